/* Asks whom a policy is for, and shows the one field of the answer. Without it all four are shown. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const question = document.getElementById("ratequota-who");
  const fields = ["plan", "user", "subject", "subject_list"].map((name) => document.getElementById(`id_${name}`));
  const rows = fields.map((field) => field?.closest(`.field-${field.name}`));
  const filled = fields.filter((field) => field?.value);
  // Viewers have no fields; who sent several has to see all of them.
  if (!question || !rows.every(Boolean) || filled.length > 1) {
    return;
  }
  rows[0].before(question.content);
  const who = document.getElementById("ratequota-who-kind");
  who.value = filled[0]?.name ?? "";
  const show = () => fields.forEach((field, at) => (rows[at].hidden = field.name !== who.value));
  who.addEventListener("change", show);
  show();
  document.getElementById("ratequota-who-help").parentElement.hidden = true;
  // What was chosen before is kept for those who change their mind, and not sent.
  fields[0].form.addEventListener("formdata", ({formData}) => {
    for (const {name} of fields.filter((field) => field.name !== who.value)) {
      formData.set(name, "");
    }
  });
});
