/* Fetches a policy's estimate when its button asks for it; the server writes it. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const panel of document.querySelectorAll(".ratequota-estimate")) {
    const form = panel.closest("form");
    if (!form) {
      continue;
    }
    panel.hidden = false;
    const running = new Map();
    const places = new Map();
    for (const button of panel.querySelectorAll("[data-ask]")) {
      places.set(button, document.getElementById(button.getAttribute("aria-controls")));
    }

    const drop = (place) => {
      running.get(place)?.abort();
      place.replaceChildren();
      place.removeAttribute("aria-busy");
    };
    // What comes back is the server's own page, escaped there. A later question ends the earlier one.
    const load = async (place, url) => {
      running.get(place)?.abort();
      const aborter = new AbortController();
      running.set(place, aborter);
      place.setAttribute("aria-busy", "true");
      try {
        const answer = await fetch(url, {method: "POST", body: new FormData(form), signal: aborter.signal});
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
    for (const [button, place] of places) {
      button.addEventListener("click", () => load(place, button.dataset.ask));
    }

    // What is shown was of another policy.
    const dropAll = () => places.forEach(drop);
    form.addEventListener("input", dropAll);
    form.addEventListener("change", dropAll);
    // Select2 announces a choice through the admin's jQuery only.
    if (window.django && window.django.jQuery) {
      window.django.jQuery(form).on("change", "select", dropAll);
    }
  }
});
