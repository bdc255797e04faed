/* Loads the page anew every ten seconds while its checkbox says so; the choice stays in the address. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("ratequota-refresh");
  if (!box) {
    return;
  }
  box.closest("[hidden]").hidden = false;
  box.addEventListener("change", () => {
    const url = new URL(window.location.href);
    if (box.checked) {
      url.searchParams.set("refresh", "1");
    } else {
      url.searchParams.delete("refresh");
    }
    window.history.replaceState(null, "", url);
  });
  window.setInterval(() => {
    // Not while nobody looks, nor under the hands of somebody who chooses or reads the numbers.
    const busy = document.querySelector(".ratequota-usage-choice select:focus, .ratequota-plot details[open]");
    if (box.checked && !document.hidden && !busy) {
      window.location.reload();
    }
  }, 10000);
});
