/* Sends requests to the example's API as the chosen caller, and shows the responses and what is left. */
"use strict";
const MOST_ENTRIES = 20;
/* How often, and how long after a request, the limits are read again: they refill meanwhile. */
const POLL_MS = 2000;
const POLLED_MS = 60000;

const find = (id) => document.getElementById(id);
const copy = (id) => find(id).content.firstElementChild.cloneNode(true);

function chosen() {
  const { value, dataset } = document.querySelector("input[name=caller]:checked");
  /* Without credentials, because the cookie of whoever is signed in would name another caller. */
  const how = { cache: "no-store", credentials: "session" in dataset ? "same-origin" : "omit" };
  if (dataset.authorization) {
    how.headers = { Authorization: dataset.authorization };
  }
  return { name: value, how };
}

function duration(seconds) {
  if (seconds < 120) {
    return `${seconds} s`;
  }
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

/* What became of a request: "admitted", "refused" by a limit, or "other", which no limit caused. */
function kind(status) {
  if (status === 429 || status === 503) {
    return "refused";
  }
  return status === 0 || status === 401 || status >= 500 ? "other" : "admitted";
}

function described(response) {
  const { status, headers } = response;
  if (status === 0) {
    return "No answer. Is the demo still running?";
  }
  if (status === 401) {
    return "Needs a user. REST framework authenticates before it counts, so nothing was counted.";
  }
  const parts = [];
  if (headers.has("X-RateLimit-Limit")) {
    parts.push(`${headers.get("X-RateLimit-Remaining")} of ${headers.get("X-RateLimit-Limit")} left`);
  }
  if (headers.has("Retry-After")) {
    parts.push(`retry after ${duration(Number(headers.get("Retry-After")))}`);
  }
  return parts.join(", ") || "The response names no limit.";
}

async function ask(method, path, how) {
  const body = method === "POST" ? new URLSearchParams({ username: "alice", password: "a wrong guess" }) : undefined;
  try {
    const response = await fetch(path, { ...how, method, body });
    return { status: response.status, headers: response.headers, text: await response.text() };
  } catch (error) {
    return { status: 0, headers: new Headers(), text: String(error) };
  }
}

function explanation(id) {
  const link = document.createElement("a");
  link.href = `${document.body.dataset.explain}?id=${encodeURIComponent(id)}`;
  link.textContent = `Why? Explain ${id} in the admin`;
  return link;
}

function show(entry, response) {
  const refusal = response.headers.get("X-RateLimit-Refusal");
  const status = entry.querySelector(".status");
  status.textContent = response.status || "–";
  status.dataset.kind = kind(response.status);
  entry.querySelector(".outcome").replaceChildren(described(response), ...(refusal ? [" ", explanation(refusal)] : []));
  const lines = [...response.headers].map(([name, value]) => `${name}: ${value}`);
  entry.querySelector("pre").textContent = `${lines.join("\n")}\n\n${response.text}`;
}

async function send(row, times) {
  const { scope, method, path } = row.dataset;
  const { name, how } = chosen();
  const entry = copy("entry");
  const asked = `${method} ${path} as ${name}`;
  entry.querySelector(".asked").textContent = times > 1 ? `${times} × ${asked}` : asked;
  const strip = entry.querySelector(".strip");
  strip.hidden = times === 1;
  find("log").prepend(entry);
  while (find("log").children.length > MOST_ENTRIES) {
    find("log").lastElementChild.remove();
  }
  const counts = { admitted: 0, refused: 0, other: 0 };
  const total = () => `${counts.admitted} admitted, ${counts.refused} refused`;
  let last;
  await Promise.all(
    Array.from({ length: times }, async () => {
      const cell = document.createElement("span");
      strip.append(cell);
      const response = await ask(method, path, how);
      const result = kind(response.status);
      counts[result] += 1;
      cell.dataset.kind = result;
      strip.setAttribute("aria-label", total());
      /* Of a burst, a refusal says most. */
      if (!last || result === "refused" || kind(last.status) !== "refused") {
        last = response;
        show(entry, response);
      }
      limits.poll();
    }),
  );
  const what = times > 1 ? total() : `${last.status}, ${described(last)}`;
  if (times > 1) {
    entry.querySelector(".outcome").prepend(`${total()}. `);
  }
  find("said").textContent = `${scope} as ${name}: ${what}`;
}

const limits = {
  reading: false,
  again: false,
  until: 0,

  /* Read them for a while: they change now, and refill later. */
  poll() {
    this.until = Date.now() + POLLED_MS;
    return this.refresh();
  },

  /* Read them now, or after the reading that has begun. */
  async refresh() {
    this.again = true;
    while (this.again && !this.reading) {
      this.again = false;
      this.reading = true;
      await this.read();
      this.reading = false;
    }
  },

  async read() {
    const { name, how } = chosen();
    const { status, text } = await ask("GET", document.body.dataset.usage, how);
    if (name !== chosen().name) {
      return;
    }
    find("caller").textContent = name;
    const usage = status === 200 ? JSON.parse(text) : { limits: [], blocked_by: [], available: false };
    const blocked = usage.blocked_by.length ? `Blocked by ${usage.blocked_by.join(", ")}.` : "";
    const unknown = "What is left is not known: Redis or the server does not answer.";
    find("blocked").textContent = usage.available ? blocked : unknown;
    find("blocked").hidden = !find("blocked").textContent;
    find("limits").replaceChildren(...usage.limits.map(this.row));
    if (usage.limits.every((limit) => limit.used === 0)) {
      this.until = 0;
    }
  },

  row(limit) {
    const row = copy("limit");
    const [title, rate] = row.querySelectorAll("th span");
    const [left, full] = row.querySelectorAll("td");
    const meter = left.querySelector("meter");
    const text = limit.remaining === null ? "unknown" : `${limit.remaining} of ${limit.limit}`;
    title.textContent = limit.title;
    rate.textContent = limit.rate;
    meter.max = limit.limit;
    meter.value = Math.max(0, limit.remaining);
    left.querySelector("span").textContent = text;
    full.textContent = limit.used === null ? "unknown" : limit.used ? duration(limit.resets_in) : "full";
    return row;
  },
};

for (const button of document.querySelectorAll(".requests button")) {
  button.addEventListener("click", () => send(button.closest("li"), Number(button.dataset.times)));
}
for (const radio of document.querySelectorAll("input[name=caller]")) {
  radio.addEventListener("change", () => limits.poll());
}
setInterval(() => {
  if (!document.hidden && Date.now() < limits.until) {
    limits.refresh();
  }
}, POLL_MS);
limits.poll();
