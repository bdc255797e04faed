/* Fetches a policy's estimate when its button asks for it; the server writes it. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const panel = document.querySelector(".ratequota-estimate");
  const form = panel?.closest("form");
  if (!form) {
    return;
  }
  panel.hidden = false;
  const button = panel.querySelector("[data-ask]");
  const place = document.getElementById(button.getAttribute("aria-controls"));
  let running = null;

  // What comes back is the server's own page, escaped there. A later question ends the earlier one.
  const load = async () => {
    running?.abort();
    running = new AbortController();
    place.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(button.dataset.ask, {method: "POST", body: new FormData(form), signal: running.signal});
      if (!answer.ok || answer.redirected) {
        throw new Error(answer.status);
      }
      place.innerHTML = await answer.text();
    } catch (error) {
      if (error.name === "AbortError") {
        return;
      }
      place.textContent = panel.dataset.failed;
    }
    place.removeAttribute("aria-busy");
  };
  // What is shown was of another policy.
  const drop = () => {
    running?.abort();
    place.replaceChildren();
    place.removeAttribute("aria-busy");
  };
  button.addEventListener("click", load);
  form.addEventListener("input", drop);
  form.addEventListener("change", drop);
  // Select2 announces a choice through the admin's jQuery only.
  window.django?.jQuery?.(form).on("change", "select", drop);
});
