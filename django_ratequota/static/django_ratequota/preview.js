/* Redraws a policy's preview as its form changes, and asks for the estimate; the server draws both. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const PAUSE = 400;
  for (const panel of document.querySelectorAll(".ratequota-preview")) {
    const form = panel.closest("form");
    if (!form) {
      continue;
    }
    const drawn = panel.querySelector(".ratequota-preview-drawn");
    const impact = panel.querySelector(".ratequota-preview-impact");
    const failed = panel.querySelector(".ratequota-preview-failed");
    const suggested = panel.querySelector(".ratequota-preview-suggest");
    const rates = form.elements.namedItem("rates");
    const running = new Map();
    let timer = 0;

    // What comes back is the server's own page, escaped there. A later question ends the earlier one.
    const load = async (place, url) => {
      const earlier = running.get(place);
      if (earlier) {
        earlier.abort();
      }
      const aborter = new AbortController();
      running.set(place, aborter);
      place.setAttribute("aria-busy", "true");
      try {
        const answer = await fetch(url, {method: "POST", body: new FormData(form), signal: aborter.signal});
        if (!answer.ok || answer.redirected) {
          throw new Error(answer.status);
        }
        const html = await answer.text();
        const open = [...drawn.querySelectorAll("details")].map((one) => one.open);
        place.innerHTML = html;
        if (place === drawn) {
          drawn.querySelectorAll("details").forEach((one, at) => {
            one.open = at < open.length ? open[at] : one.open;
          });
        }
        failed.textContent = "";
      } catch (error) {
        if (error.name === "AbortError") {
          return;
        }
        place.replaceChildren();
        failed.textContent = panel.dataset.failed;
      }
      if (running.get(place) === aborter) {
        place.removeAttribute("aria-busy");
      }
    };

    const filledIn = (but) => {
      const data = new FormData(form);
      data.delete(but);
      return new URLSearchParams(data).toString();
    };
    const drop = (place) => {
      running.get(place)?.abort();
      place.replaceChildren();
      place.removeAttribute("aria-busy");
    };
    let shown = filledIn();
    let apartFromRates = filledIn("rates");
    const redraw = () => {
      clearTimeout(timer);
      // Leaving a field announces a change that was seen while it was typed.
      if (filledIn() === shown) {
        return;
      }
      shown = filledIn();
      // What was estimated is of another policy now.
      drop(impact);
      // Suggestions do not depend on the rates that are written.
      if (filledIn("rates") !== apartFromRates) {
        apartFromRates = filledIn("rates");
        drop(suggested);
      }
      load(drawn, panel.dataset.preview);
    };
    const later = () => {
      clearTimeout(timer);
      timer = setTimeout(redraw, PAUSE);
    };
    form.addEventListener("input", later);
    form.addEventListener("change", later);
    // Select2 announces a choice through the admin's jQuery only.
    if (window.django && window.django.jQuery) {
      window.django.jQuery(form).on("change", "select", later);
    }
    for (const [what, place] of [["impact", impact], ["suggest", suggested]]) {
      const button = panel.querySelector(`[data-ask=${what}]`);
      button.parentElement.hidden = false;
      button.addEventListener("click", () => {
        redraw();
        load(place, panel.dataset[what]);
      });
    }
    suggested.addEventListener("click", (event) => {
      const button = event.target.closest("[data-rate]");
      if (button && rates) {
        rates.value = button.dataset.rate;
        rates.dispatchEvent(new Event("input", {bubbles: true}));
        rates.focus();
      }
    });
    if (rates && rates.value.trim() && drawn.querySelector(".ratequota-preview-nothing")) {
      load(drawn, panel.dataset.preview);
    }
  }
});
