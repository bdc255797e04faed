/* Adds a clicked route or URL name to the text area above the list, as a line of its own. */
"use strict";
document.addEventListener("click", (event) => {
  const button = event.target.closest(".ratequota-routes button[data-pattern]");
  if (!button) {
    return;
  }
  const area = document.getElementById(button.closest("details").dataset.target);
  const lines = area.value.split("\n").filter((line) => line.trim());
  if (!lines.includes(button.dataset.pattern)) {
    area.value = [...lines, button.dataset.pattern].join("\n");
  }
  area.focus();
});
