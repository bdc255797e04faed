/* Gives the fields that select2 draws for autocomplete selects the names of those: by itself it leaves them nameless. */
"use strict";
{
  const nameAll = (root) => {
    for (const select of root.querySelectorAll("select.admin-autocomplete")) {
      const selection = select.nextElementSibling?.querySelector(".select2-selection");
      const name = select.getAttribute("aria-label") || select.labels[0]?.textContent.trim().replace(/:$/, "");
      if (!selection || !name) {
        continue;
      }
      const chosen = selection.querySelector(".select2-selection__rendered");
      chosen.removeAttribute("role");
      chosen.removeAttribute("aria-readonly");
      selection.id = `${select.id}-selection`;
      selection.setAttribute("aria-label", name);
      selection.setAttribute("aria-labelledby", `${selection.id} ${chosen.id}`);
    }
  };
  // Both after the admin's own autocomplete.js, whose handlers were there first.
  django.jQuery(() => nameAll(document));
  document.addEventListener("formset:added", (event) => nameAll(event.target));
}
