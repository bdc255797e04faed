/* Moves plans in their list, by drag or by arrow keys: fills in their positions, which are saved with the list. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  // The distance of two positions, as in admin/plans.py.
  const STEP = 10;
  const fields = () => [...document.querySelectorAll("#result_list input[data-move]")];
  const [first, second] = fields();
  if (!second) {
    return;
  }
  // django-unfold has a tbody for each row.
  const part = first.closest("tbody") === second.closest("tbody") ? "tr" : "tbody";
  const said = document.createElement("p");
  said.className = "ratequota-said";
  said.setAttribute("aria-live", "polite");
  first.closest("table").after(said);

  const set = (field, position) => {
    field.value = position;
    field.classList.toggle("ratequota-changed", field.value !== field.defaultValue);
  };
  // Between its neighbours; where there is no room, the later plans move on.
  const number = (moved) => {
    const all = fields();
    const at = all.indexOf(moved);
    const low = at ? Number(all[at - 1].value) : -STEP;
    const high = at + 1 < all.length ? Number(all[at + 1].value) : Infinity;
    if (at && high - low > 1) {
      set(moved, low + Math.min(STEP, Math.floor((high - low) / 2)));
    } else if (!at && high > 0) {
      set(moved, Math.max(0, high - STEP));
    } else {
      let end = low + STEP;
      set(moved, end);
      for (const field of all.slice(at + 1)) {
        if (Number(field.value) > end) {
          break;
        }
        end += STEP;
        set(field, end);
      }
    }
    said.textContent = `${moved.dataset.move}: ${at + 1} / ${all.length}`;
  };

  for (const field of fields()) {
    const row = field.closest(part);
    const handle = document.createElement("button");
    handle.type = "button";
    handle.className = "ratequota-move";
    handle.setAttribute("aria-label", field.dataset.move);
    field.before(handle);
    // The others are moved, because a row that leaves the page would lose the focus and the pointer.
    const step = (up) => {
      const other = up ? row.previousElementSibling : row.nextElementSibling;
      if (!other?.querySelector("input[data-move]")) {
        return false;
      }
      row[up ? "after" : "before"](other);
      return true;
    };

    handle.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        event.preventDefault();
        step(event.key === "ArrowUp");
        number(field);
        handle.scrollIntoView({block: "nearest"});
      }
    });
    handle.addEventListener("pointerdown", (event) => {
      if (event.button) {
        return;
      }
      event.preventDefault();
      handle.focus();
      handle.setPointerCapture(event.pointerId);
      const before = fields().indexOf(field);
      row.classList.add("ratequota-moving");
      const drag = (moving) => {
        const over = document.elementFromPoint(row.getBoundingClientRect().left + 9, moving.clientY)?.closest(part);
        if (!over || over === row || over.parentElement !== row.parentElement) {
          return;
        }
        const isAbove = () => row.compareDocumentPosition(over) & Node.DOCUMENT_POSITION_PRECEDING;
        const above = isAbove();
        while (isAbove() === above && step(above)) {
          // one row further
        }
      };
      const drop = () => {
        handle.removeEventListener("pointermove", drag);
        row.classList.remove("ratequota-moving");
        if (fields().indexOf(field) !== before) {
          number(field);
        }
      };
      handle.addEventListener("pointermove", drag);
      handle.addEventListener("lostpointercapture", drop, {once: true});
    });
  }
});
