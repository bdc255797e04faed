/* Names the admin's autocompletes for screen readers: select2 does so only where something is chosen. */
"use strict";
{
  const nameThem = () => {
    for (const shown of document.querySelectorAll(".select2-selection__rendered:not([aria-label])")) {
      const select = shown.closest(".select2-container").previousElementSibling;
      if (select && select.labels && select.labels.length) {
        shown.setAttribute("aria-label", select.labels[0].textContent.trim().replace(/:$/, ""));
      }
    }
  };
  // They are made some time after the document is ready, and again for each row that is added.
  document.addEventListener("DOMContentLoaded", () => {
    nameThem();
    new MutationObserver(nameThem).observe(document.body, { childList: true, subtree: true });
  });
}
