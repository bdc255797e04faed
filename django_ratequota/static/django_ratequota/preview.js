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
    const ask = panel.querySelector(".ratequota-preview-ask");
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

    const filledIn = () => new URLSearchParams(new FormData(form)).toString();
    let shown = filledIn();
    const redraw = () => {
      clearTimeout(timer);
      // Leaving a field announces a change that was seen while it was typed.
      if (filledIn() === shown) {
        return;
      }
      shown = filledIn();
      // What was estimated is of another policy now.
      running.get(impact)?.abort();
      impact.replaceChildren();
      impact.removeAttribute("aria-busy");
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
    ask.hidden = false;
    ask.querySelector("button").addEventListener("click", () => {
      redraw();
      load(impact, panel.dataset.impact);
    });
    const rates = form.elements.namedItem("rates");
    if (rates && rates.value.trim() && drawn.querySelector(".ratequota-preview-nothing")) {
      load(drawn, panel.dataset.preview);
    }
  }
});
