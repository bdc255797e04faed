/* Completes subjects such as tenant:acme in text fields: fills the browser's own list of suggestions while one types. */
"use strict";
{
  const PAUSE = 200;
  let running = null;
  let timer = 0;

  const listOf = (field) => {
    if (!field.list) {
      const list = document.createElement("datalist");
      list.id = `${field.id}_subjects`;
      field.after(list);
      field.setAttribute("list", list.id);
    }
    return field.list;
  };
  const offer = async (field, typed) => {
    // In a field for the values of one kind, the kind is left out.
    const kind = field.dataset.ratequotaKind ? `${field.dataset.ratequotaKind}:` : "";
    const query = new URLSearchParams({q: kind + field.value});
    running?.abort();
    running = new AbortController();
    try {
      const answer = await fetch(`${field.dataset.ratequotaSubjects}?${query}`, {signal: running.signal});
      if (answer.ok && !answer.redirected) {
        const {subjects} = await answer.json();
        listOf(field).replaceChildren(
          ...subjects.map(([subject, name]) => new Option(name, subject.slice(kind.length))),
        );
        // Browsers show a list that has changed only after the next key. Not one of which an option was just chosen.
        if (typed && subjects.every(([subject]) => subject !== kind + field.value)) {
          field.showPicker?.();
        }
      }
    } catch {
      // Nothing is offered, or not shown yet.
    }
  };
  const later = (event) => {
    if (event.target.dataset?.ratequotaSubjects) {
      clearTimeout(timer);
      timer = setTimeout(offer, PAUSE, event.target, event.type === "input");
    }
  };
  document.addEventListener("input", later);
  document.addEventListener("focusin", later);
}
