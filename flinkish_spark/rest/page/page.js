"use strict";
/* One page over the server's answers: no build step, no library. What comes from a job becomes text nodes only. */

// -- the server ------------------------------------------------------------------------------------
const TOKEN = "flinkish-token";

/** The link brings the token behind `#`, which no browser sends; it stays in this tab. */
function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname + "#/");
}

function headers(more = {}) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function asked(path, method = "GET", body) {
  const json = body === undefined ? undefined : JSON.stringify(body);
  const more = json === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, { method, body: json, headers: headers(more), cache: "no-store" });
  const text = await answer.text();
  const found = text ? JSON.parse(text) : null;
  if (!answer.ok) throw new Refused(answer.status, (found && found.errors || [answer.statusText]).join(" "));
  return found;
}

/** Calls `onChange` with each event, until `signal` ends it; connects again when the connection is lost. */
async function listen(path, signal, onChange, onState) {
  let pause = 500;
  while (!signal.aborted) {
    try {
      const answer = await fetch(path, { headers: headers(), signal, cache: "no-store" });
      if (!answer.ok) throw new Refused(answer.status, answer.statusText);
      onState(true);
      pause = 500;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        if (parts.some((part) => part.startsWith("event:"))) onChange();
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    onState(false);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 10_000);
  }
}

// -- elements --------------------------------------------------------------------------------------
const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "g", "rect", "path", "text", "line", "title", "circle"]);

function h(tag, attributes = {}, ...children) {
  const made = IN_SVG.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "width%") made.style.width = `${value}%`;
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

const UNKNOWN = "–";
const at = (ms) => ms === null || ms === undefined || ms <= 0 ? UNKNOWN : new Date(ms).toLocaleString(undefined, { hour12: false });
const count = (n) => n === null || n === undefined ? UNKNOWN : n.toLocaleString();
const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = (share) => share === null || share === undefined ? UNKNOWN : `${(share * 100).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;

function lasted(ms) {
  if (ms === null || ms === undefined) return UNKNOWN;
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1_000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor(ms % 60_000 / 1_000)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(n) {
  if (n === null || n === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; n >= 1_024 && place < units.length - 1; place++) n /= 1_024;
  return `${place ? n.toFixed(1) : n} ${units[place]}`;
}

const GOOD = { RUNNING: "▶", FINISHED: "✓", COMPLETED: "✓", COMMIT: "✓" };
const WARN = { RESTARTING: "↻", CREATED: "…", INITIALIZING: "…", CANCELLING: "…", IN_PROGRESS: "…", SUSPENDED: "‖", SCHEDULED: "…" };
const BAD = { FAILED: "✕", FAILING: "✕", ABORT: "✕" };

function badge(state) {
  if (!state) return UNKNOWN;
  const [kind, sign] = state in GOOD ? ["good", GOOD[state]] : state in WARN ? ["warn", WARN[state]] : state in BAD ? ["bad", BAD[state]] : ["", "■"];
  return h("span", { class: `badge ${kind}` }, `${sign} ${state.replace("_", " ")}`);
}

const level = (share) => share > 0.5 ? "high" : share > 0.1 ? "low" : "ok";
/** Busy is worth a colour only when little is left; held back is from the first tenth on. */
const busyLevel = (share) => share > 0.9 ? "high" : share > 0.7 ? "low" : "ok";

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value, kind]) => h("div", { class: kind }, h("dt", {}, name), h("dd", {}, value ?? UNKNOWN))));
}

/** A column is [heading, cell of a row, class]; on a narrow screen a row becomes a card, unless `kind` says else. */
function table(caption, columns, rows, none, kind = "stack") {
  if (!rows.length) return h("p", { class: "none" }, none);
  const head = h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)));
  const body = rows.map((row) => h("tr", {}, columns.map(([name, cell, kind]) => h("td", { class: kind, "data-name": name }, cell(row)))));
  return h("div", { class: "scroll" }, h("table", { class: kind }, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body)));
}

// -- all jobs --------------------------------------------------------------------------------------
async function allJobs() {
  const [{ jobs }, unreadable] = await Promise.all([asked("flinkish/jobs"), asked("flinkish/unreadable")]);
  const broken = Object.entries(unreadable);
  return [
    h("h1", {}, "Jobs"),
    h("div", { class: "sheet" }, table("", [
      ["job", (job) => h("a", { href: `#/job/${job.id}/graph` }, job.name), "wide"],
      ["state", (job) => badge(job.status)],
      ["started", (job) => at(job.began_at_ms)],
      ["restarts", (job) => count(job.restarts), "number"],
      ["checkpoints", (job) => count(job.completed), "number"],
      ["failed", (job) => count(job.failed), "number"],
      ["newest checkpoint", (job) => at(job.newest_at_ms)],
      ["it took", (job) => lasted(job.newest_took_ms), "number"],
    ], jobs, "There is no job in these directories yet. A job appears here with its first start.")),
    broken.length ? [h("h2", {}, "Directories that cannot be read"), h("div", { class: "sheet" }, broken.map(([place, why]) =>
      h("p", {}, h("code", {}, place), h("br"), why)))] : null,
  ];
}

// -- one job ---------------------------------------------------------------------------------------
const TABS = [
  ["graph", "Graph", graphTab], ["lines", "Over time", linesTab], ["checkpoints", "Checkpoints", checkpointsTab], ["sinks", "Sinks", sinksTab],
  ["time", "Event time", timeTab], ["restarts", "Restarts", restartsTab], ["operate", "Operate", operateTab],
];

async function oneJob(id, tab, rest) {
  const job = await asked(`jobs/${id}/flinkish`);
  const [, , shown] = TABS.find(([name]) => name === tab) || TABS[0];
  const content = await shown(id, job, rest);
  document.getElementById("crumbs").replaceChildren(h("a", { href: "#/" }, "Jobs"), " / ", job.name);
  document.title = `${job.name} – ${job.status} – flinkish_spark`;
  const since = job.ended_at_ms ? ["ended", at(job.ended_at_ms)] : ["runs for", job.began_at_ms ? lasted(job.now_ms - job.began_at_ms) : UNKNOWN];
  return [
    h("div", { class: "row" }, h("h1", {}, job.name), badge(job.status)),
    job.was_cut_off ? h("p", { class: "badge warn" }, job.owner.life === "ENDED" ? "Its process is gone; the next start goes on from its newest checkpoint."
      : `Nothing was heard of it since ${at(job.heard_at_ms)}; whether its process lives is not seen from this machine.`) : null,
    h("div", { class: "sheet" }, facts([
      ["started", at(job.began_at_ms)], since, ["restarts", count(job.restarts)], ["lineage", count(job.lineage)],
      ["driver", job.owner.host ? `${job.owner.host}, process ${job.owner.pid}` : UNKNOWN], ["owner", `epoch ${job.owner.epoch}`],
      ["Spark's page", link(job.settings.spark_ui)],
      ["job id", h("code", {}, id), "wide"], ["directory", h("code", {}, job.job_dir), "wide"],
    ])),
    job.waits.length ? [h("h2", {}, "Held back"), h("div", { class: "sheet" }, table("Who has waited for longer than two checkpoint intervals, and for what", [
      ["who", (one) => one.who], ["waits for", (one) => one.what, "wide"], ["for", (one) => lasted(job.now_ms - one.since_ms), "number"],
      ["last error", (one) => one.error || UNKNOWN, "wide"],
    ], job.waits, ""))] : null,
    h("nav", { class: "tabs", "aria-label": "Parts of the job" }, TABS.map(([name, title]) =>
      h("a", { href: `#/job/${id}/${name}`, "aria-current": name === tab ? "page" : null }, title,
        name === "restarts" && job.failures.length ? ` (${job.failures.length})` : ""))),
    content,
  ];
}

// -- the graph -------------------------------------------------------------------------------------
const BOX = { width: 230, height: 112, across: 90, down: 24 };

/** Vertices by layer: each one behind all that it reads. */
function layers(vertices) {
  const depth = new Map();
  for (const one of vertices) depth.set(one.id, Math.max(-1, ...one.inputs.map((way) => depth.get(way.id) ?? -1)) + 1);
  const found = [];
  for (const one of vertices) (found[depth.get(one.id)] ||= []).push(one);
  return found;
}

function bar(x, y, width, share, kind, name) {
  const known = share !== null && share !== undefined;
  return h("g", {},
    h("text", { x, y: y + 9, class: "quiet" }, name),
    h("rect", { x: x + 70, y, width, height: 10, rx: 3, class: "track" }),
    known ? h("rect", { x: x + 70, y, width: Math.max(share > 0 ? 2 : 0, width * share), height: 10, rx: 3, class: `level-${kind}` }) : null,
    h("text", { x: x + 77 + width, y: y + 9 }, percent(share)));
}

const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
/** Only an address of a page becomes a link: what a job reports may be anything. */
const link = (url) => /^https?:\/\//.test(url || "") ? h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, "jobs and stages ↗") : UNKNOWN;
const perSecond = (n) => n === null || n === undefined ? UNKNOWN : `${n.toLocaleString()} /s`;

function drawnGraph(vertices) {
  const columns = layers(vertices);
  const tallest = Math.max(...columns.map((column) => column.length));
  // From left to right; on a narrow screen from the top down, so that nothing has to be scrolled sideways.
  const isNarrow = innerWidth < 640;
  const along = isNarrow ? BOX.height + 44 : BOX.width + BOX.across, beside = isNarrow ? BOX.width + 14 : BOX.height + BOX.down;
  const length = columns.length * along - (along - (isNarrow ? BOX.height : BOX.width)) + 6, breadth = tallest * beside + 6;
  const [width, height] = isNarrow ? [breadth, length] : [length, breadth];
  const placed = new Map();
  columns.forEach((column, x) => column.forEach((one, y) => {
    const aside = isNarrow ? 3 + y * beside : (breadth - column.length * beside) / 2 + y * beside + BOX.down / 2, ahead = 3 + x * along;
    placed.set(one.id, isNarrow ? { left: aside, top: ahead } : { left: ahead, top: aside });
  }));
  const edges = vertices.flatMap((one) => one.inputs.map((way) => {
    const from = placed.get(way.id), to = placed.get(one.id);
    if (!from || !to) return null;
    if (isNarrow) {
      const x1 = from.left + BOX.width / 2, y1 = from.top + BOX.height, x2 = to.left + BOX.width / 2, y2 = to.top - 7;
      return h("g", {}, h("path", { class: "edge", d: `M${x1} ${y1}C${x1} ${y1 + 20} ${x2} ${y2 - 20} ${x2} ${y2}` }),
        h("path", { class: "head", d: `M${x2 - 4} ${y2}l4 7l4 -7z` }), h("text", { x: x2 + 10, y: y2 - 3, class: "quiet halo" }, way.ship));
    }
    const x1 = from.left + BOX.width, y1 = from.top + BOX.height / 2, x2 = to.left - 7, y2 = to.top + BOX.height / 2;
    const middle = (x1 + x2) / 2;
    return h("g", {}, h("path", { class: "edge", d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` }),
      h("path", { class: "head", d: `M${x2} ${y2 - 4}l7 4l-7 4z` }),
      h("text", { x: middle, y: (y1 + y2) / 2 - 6, "text-anchor": "middle", class: "quiet halo" }, way.ship));
  }));
  const boxes = vertices.map((one) => {
    const { left, top } = placed.get(one.id);
    const x = left + 12;
    const rate = one.kind === "SINK" ? `out ${perSecond(one.records_out_per_second)}` : `in ${perSecond(one.records_in_per_second)}`;
    const said = `${one.name}: ${one.state || "not started"}, ${rate}, busy ${percent(one.busy)}, held back ${percent(one.back_pressured)}`;
    return h("g", { role: "img", "aria-label": said, tabindex: "0" }, h("title", {}, said),
      h("rect", { x: left, y: top, width: BOX.width, height: BOX.height, rx: 7, class: `box ${one.kind}` }),
      h("text", { x, y: top + 21, "font-weight": "600" }, short(one.name, 30)),
      h("text", { x, y: top + 39, class: "quiet" }, short(`${(one.state || "not started").toLowerCase()} · ${one.parallelism ? `${one.parallelism} tasks` : "tasks as read"}`, 34)),
      h("text", { x, y: top + 58 }, rate),
      bar(x, top + 70, 90, one.busy, one.busy === null ? "ok" : busyLevel(one.busy), "busy"),
      bar(x, top + 90, 90, one.back_pressured, one.back_pressured === null ? "ok" : level(one.back_pressured), "held back"));
  });
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Job graph; scrolls sideways" },
    h("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, edges, boxes));
}

async function graphTab(id) {
  const found = await asked(`jobs/${id}/flinkish/graph`);
  if (!found.vertices.length) return h("p", { class: "none" }, "Nothing has run yet; the graph is written down at the first start.");
  const span = found.span_ms ? `Measured between the two newest checkpoints: ${lasted(found.span_ms)}, up to ${at(found.ended_at_ms)}.`
    : "Rates and shares need two complete checkpoints.";
  return [
    h("div", { class: "sheet" }, drawnGraph(found.vertices),
      h("p", { class: "quiet" }, span, " Spark runs the vertices of a micro-batch as one query, so those in front of the sinks are busy, or held back, together.")),
    h("div", { class: "sheet" }, table("Vertices", [
      ["vertex", (one) => one.name, "wide"],
      ["state", (one) => badge(one.state)],
      ["operators", (one) => one.operators.map((operator) => h("div", {}, operator.uid || operator.title, h("span", { class: "quiet" }, ` ${operator.does} · ${operator.runs_in}`))), "wide"],
      ["tasks", (one) => one.parallelism ?? "as read", "number"],
      ["key groups", (one) => count(one.max_parallelism), "number"],
      ["in", (one) => perSecond(one.records_in_per_second), "number"],
      ["out", (one) => perSecond(one.records_out_per_second), "number"],
      ["busy", (one) => percent(one.busy), "number"],
      ["held back", (one) => percent(one.back_pressured), "number"],
      ["watermark", (one) => at(one.watermark_ms)],
    ], found.vertices, ""),
    h("p", { class: "quiet" }, "Busy: the share of the time in which micro-batches ran. Held back: the share in which they waited because too many were not committed yet.")),
    h("div", { class: "sheet" }, table("Totals since the first start, as of the newest complete checkpoint", [
      ["vertex", (one) => one.name, "wide"],
      ["rows read", (one) => count(one.totals.read), "number"],
      ["rows written", (one) => count(one.totals.written), "number"],
      ["not read yet", (one) => count(one.totals.unread), "number"],
      ["dropped as late", (one) => count(one.totals.late), "number"],
    ], found.vertices, "")),
  ];
}

// -- over time -------------------------------------------------------------------------------------
async function linesTab(id, job, [span = "hour"]) {
  const found = await asked(`jobs/${id}/flinkish/series`);
  const isWeek = span === "week", { points, slot_ms } = isWeek ? found.week : found.hour;
  const base = `#/job/${id}/lines`;
  const choice = h("nav", { class: "row", "aria-label": "How far back" }, [["hour", "Last hour"], ["week", "Last week"]].map(([name, title]) =>
    h("a", { href: `${base}/${name}`, "aria-current": (name === "week") === isWeek ? "page" : null }, title)));
  const frame = { from: found.now_ms - (isWeek ? 7 * 24 : 1) * 3_600_000, to: found.now_ms, slot_ms, points };
  if (!points.some((one) => one.at_ms >= frame.from)) return [choice, h("p", { class: "none" }, "Nothing was measured in this time. A point is added with each complete checkpoint.")];
  const many = (n) => count(n < 100 ? Math.round(n * 10) / 10 : Math.round(n));
  return [
    choice,
    h("div", { class: "charts" },
      chart("Rows per second", "What sources read and sinks wrote, from one complete checkpoint to the next.", frame, many,
        [["in", "sync", (one) => one.in_per_second], ["out", "commit", (one) => one.out_per_second]]),
      chart("Not read yet", "Rows that wait in front of the sources. If the worst partition has most of them, keys or partitions are skewed. Known of topics, and of inputs that end.", frame, many,
        [["all partitions", "alignment", (one) => one.lag], ["worst partition", "async", (one) => one.worst_lag]]),
      chart("Checkpoint duration", "From the request until all sinks show it. Above the interval, the interval cannot be kept.", frame, lasted,
        [["longest checkpoint", "sync", (one) => one.took_ms], ["interval", "limit", () => found.interval_ms]])),
    h("p", { class: "quiet" }, `A point stands for ${lasted(slot_ms).replace(" 0 s", "")}. `, h("i", { class: "key start" }),
      "Here the job went on from a checkpoint: a restart, or a new start. Where a line is missing nothing was measured, such as while the job was down."),
  ];
}

const CHART = { height: 170, left: 58, right: 14, top: 12, bottom: 24 };

/** Lines over the same time; a line is [name, class, value of a point]. */
function chart(name, says, { from, to, slot_ms, points }, format, lines) {
  const shown = points.filter((one) => one.at_ms >= from);
  const room = document.getElementById("main").clientWidth;
  const width = Math.max(240, room > 900 ? (room - 50) / 2 - 34 : room - (innerWidth > 640 ? 74 : 58)), { height, left, right, top, bottom } = CHART;
  const most = niceMost(Math.max(0, ...lines.flatMap(([, , value]) => shown.map((one) => value(one) ?? 0))), format === lasted);
  const x = (ms) => left + (ms - from) / (to - from) * (width - left - right), y = (value) => height - bottom - value / most * (height - top - bottom);
  const steps = shown.slice(1).map((one, place) => one.at_ms - shown[place].at_ms).sort((a, b) => a - b);
  // A distance that is long for this line: nothing was measured in between.
  const gap = 4 * Math.max(slot_ms, steps[Math.floor(steps.length / 2)] || 0);
  const time = (ms) => to - from > 86_400_000 ? new Date(ms).toLocaleDateString(undefined, { weekday: "short", day: "numeric" }) : new Date(ms).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
  const drawn = lines.map(([, kind, value]) => {
    if (kind === "limit") return h("path", { class: "line limit", d: value({}) ? `M${left} ${y(value({}))}H${width - right}` : "" });
    let path = "", last = -Infinity;
    for (const one of shown) {
      if (value(one) === null || value(one) === undefined) continue;
      const place = `${x(one.at_ms).toFixed(1)} ${y(value(one)).toFixed(1)}`;
      // A line of no length is a point, by its round ends.
      path += one.at_ms - last > gap ? `M${place}h0` : `L${place}`;
      last = one.at_ms;
    }
    return h("path", { class: `line ${kind}`, d: path });
  });
  const said = ([title, , value]) => {
    const known = shown.map(value).filter((one) => one !== null && one !== undefined);
    if (!known.length) return `${title}: not measured`;
    const newest = known.at(-1), most = Math.max(...known);
    return `${title}: ${format(newest)}${most > newest ? `, at most ${format(most)}` : ""}`;
  };
  return h("div", { class: "sheet" }, h("h3", {}, name), h("p", { class: "quiet" }, says),
    h("div", { class: "legend" }, lines.map((line) => h("span", {}, h("i", { class: `key ${line[1]}` }), said(line)))),
    h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}; ${lines.map(said).join("; ")}` },
      [0, 0.5, 1].map((part) => h("g", {}, h("line", { x1: left, x2: width - right, y1: y(part * most), y2: y(part * most), class: "grid" }),
        h("text", { x: left - 8, y: y(part * most) + 4, "text-anchor": "end", class: "quiet" }, format(part * most)))),
      [0, 1 / 3, 2 / 3, 1].map((part) => h("text", { x: x(from + part * (to - from)), y: height - 6, "text-anchor": ["start", "middle", "middle", "end"][Math.round(part * 3)], class: "quiet" }, time(from + part * (to - from)))),
      shown.filter((one) => one.starts).map((one) => h("line", { x1: x(one.at_ms), x2: x(one.at_ms), y1: top - 8, y2: height - bottom, class: "start" },
        h("title", {}, `${at(one.at_ms)}: went on from a checkpoint ${one.starts === 1 ? "once" : `${one.starts} times`}`))),
      drawn,
      shown.map((one) => h("rect", { x: x(one.at_ms) - 3, y: top, width: 6, height: height - top - bottom, class: "over" },
        h("title", {}, [at(one.at_ms), ...lines.map(([title, , value]) => `${title}: ${value(one) === null || value(one) === undefined ? UNKNOWN : format(value(one))}`)].join("\n"))))));
}

/** The end of an axis: 1, 2, 2.5 or 5 of a power of ten; of durations a number that one reads as a time. */
function niceMost(most, isTime) {
  if (isTime && most > 10_000) return [20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 21_600, 86_400].map((s) => s * 1_000).find((ms) => ms >= most) || most;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, most)));
  return [1, 2, 2.5, 5, 10].find((factor) => factor * power >= most) * power;
}

// -- checkpoints -----------------------------------------------------------------------------------
const PAGE = innerWidth < 640 ? 15 : 50;

async function checkpointsTab(id, job, rest) {
  const [where, number] = rest;
  if (where === "show") return checkpointShown(id, number);
  const before = where === "before" ? Number(number) : null;
  const found = await asked(`jobs/${id}/flinkish/checkpoints?limit=${PAGE}${before ? `&before=${before}` : ""}`);
  const { counts } = found;
  const base = `#/job/${id}/checkpoints`;
  const settings = job.settings;
  const jump = h("input", { type: "number", min: "1", id: "jump", "aria-label": "Id of a checkpoint", placeholder: "id" });
  return [
    h("div", { class: "sheet" }, facts([
      ["completed", count(counts.completed)], ["failed", count(counts.failed)], ["in progress", count(counts.in_progress)],
      ["refused requests", count(counts.refused)], ["starts from one", count(counts.restored)], ["kept in the directory", count(found.known)],
      ["interval", lasted(settings.interval_ms)], ["timeout", lasted(settings.timeout_ms)], ["at most at a time", count(settings.max_concurrent)],
    ])),
    found.hint ? h("p", { class: "sheet hint", role: "note" }, found.hint) : null,
    h("h2", {}, "Timeline"),
    h("div", { class: "sheet" }, gantt(found.checkpoints.slice(0, 20), base)),
    h("h2", {}, "Summary"),
    h("div", { class: "sheet" }, summaryTable(found.summary)),
    h("h2", {}, "History"),
    h("div", { class: "sheet" },
      h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); if (jump.value) location.hash = `${base}/show/${jump.value}`; } },
        h("label", {}, "Checkpoint ", jump), h("button", {}, "Show")),
      history_(found.checkpoints, base),
      h("nav", { class: "row", "aria-label": "Older and newer checkpoints" },
        before ? h("a", { href: base }, "Newest") : null,
        found.older_than ? h("a", { href: `${base}/before/${found.older_than}` }, `Older than ${found.older_than}`) : null)),
  ];
}

function history_(checkpoints, base) {
  return table(`${checkpoints.length} checkpoints, the newest first; durations from the request to the end`, [
    ["id", (one) => h("a", { href: `${base}/show/${one.id}` }, one.id)],
    ["status", (one) => badge(one.status)],
    ["for", (one) => one.purpose.replace("_", " ").toLowerCase()],
    ["triggered", (one) => at(one.triggered_at_ms)],
    ["end to end", (one) => lasted(one.durations.end_to_end_ms), "number"],
    ["staging", (one) => lasted(one.durations.sync_ms), "number"],
    ["commit", (one) => lasted(one.durations.commit_ms), "number"],
    ["rows", (one) => count(one.rows), "number"],
    ["bytes", (one) => bytes(one.bytes_staged), "number"],
    ["acknowledged", (one) => one.asked === null ? UNKNOWN : `${one.acknowledged} / ${one.asked}`, "number"],
    ["", (one) => one.failure ? [one.failure.reason, one.failure.text].filter(Boolean).join(": ")
      : one.superseded_by_lineage ? `left behind by lineage ${one.superseded_by_lineage}` : "", "wide"],
  ], checkpoints, "There are no checkpoints yet.");
}

const NAMES = { trigger_ms: "trigger", start_delay_ms: "start delay", alignment_ms: "alignment", sync_ms: "staging (sync)", async_ms: "decision (async)", commit_ms: "commit", end_to_end_ms: "end to end", rows: "rows", bytes_staged: "bytes staged" };

function summaryTable(summary) {
  const cell = (name) => ([quantity, one]) => quantity === "rows" ? count(Math.round(one[name])) : quantity === "bytes_staged" ? bytes(one[name]) : lasted(one[name]);
  const rows = Object.entries(summary);
  return table("Over the newest 1,000 complete checkpoints", [
    ["", ([quantity]) => NAMES[quantity] || quantity, "wide"],
    ...["min", "avg", "p50", "p99", "max"].map((name) => [name, cell(name), "number"]),
    ["count", ([, one]) => count(one.count), "number"],
  ], rows, "Nothing to sum up yet.", "plain");
}

/** The parts of a checkpoint as [class, begin, length, what]; they are laid out from its end backwards. */
function phases(one) {
  const d = one.durations, total = d.end_to_end_ms || 0;
  const decided = total - (d.commit_ms || 0), staged = decided - (d.async_ms || 0);
  const found = [];
  if (d.trigger_ms !== null) found.push(["trigger", 0, d.trigger_ms, "trigger: from the request to the barrier"]);
  if (one.status === "FAILED") return { found, total, decided: null };
  if (d.alignment_ms !== null) found.push(["alignment", Math.max(0, staged - d.alignment_ms), d.alignment_ms, "alignment: from the first barrier to the last"]);
  const waits = Math.max(0, staged - (d.sync_ms || 0)) - d.trigger_ms;
  if (d.trigger_ms !== null && d.sync_ms !== null && waits > 0) found.push(["wait", d.trigger_ms, waits, "wait for its micro-batch: the one before runs to its end, then Spark plans the one with the barrier"]);
  if (d.sync_ms !== null) found.push(["sync", Math.max(0, staged - d.sync_ms), d.sync_ms, "staging (sync): the stream waits for it"]);
  if (d.async_ms !== null) found.push(["async", staged, d.async_ms, "decision (async): until it is durable; the stream goes on"]);
  let begin = decided, odd = false;
  const commits = (one.participants || []).filter((participant) => participant.commit_ms !== null);
  for (const sink of commits) {
    found.push([`commit${odd ? " odd" : ""}`, begin, sink.commit_ms, `commit of sink ${sink.uid}`]);
    begin += sink.commit_ms;
    odd = !odd;
  }
  if (d.commit_ms !== null && begin < total) found.push([`commit${odd ? " odd" : ""}`, begin, total - begin, commits.length ? "receipt and group offsets" : "commit"]);
  return { found, total, decided: d.commit_ms === null ? null : decided };
}

function gantt(checkpoints, base) {
  const measured = checkpoints.filter((one) => one.durations.end_to_end_ms !== null);
  if (!measured.length) return h("p", { class: "none" }, "No checkpoint was measured yet.");
  const longest = Math.max(1, ...measured.map((one) => one.durations.end_to_end_ms));
  const room = document.getElementById("main").clientWidth - 76;
  const left = 62, right = 78, width = Math.max(560, room), row = 22, height = measured.length * row + 24;
  const scale = (ms) => left + ms / longest * (width - left - right);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => h("g", {},
    h("line", { x1: scale(part * longest), x2: scale(part * longest), y1: 0, y2: height - 18, class: "grid" }),
    h("text", { x: scale(part * longest), y: height - 4, "text-anchor": "middle", class: "quiet" }, lasted(part * longest))));
  const rows = measured.map((one, place) => {
    const y = place * row + 3, { found, total, decided } = phases(one);
    return h("g", {},
      h("text", { x: left - 8, y: y + 12, "text-anchor": "end" }, one.id),
      one.status === "FAILED" ? h("rect", { x: scale(0), y: y + 1, width: Math.max(2, scale(total) - left), height: 14, class: "failed", opacity: "0.45" }) : null,
      found.map(([kind, begin, length, what]) => h("rect", {
        x: scale(begin), y: kind === "alignment" ? y - 2 : y + 1, width: Math.max(1, scale(begin + length) - scale(begin)),
        height: kind === "alignment" ? 3 : 14, class: kind,
      }, h("title", {}, `checkpoint ${one.id}, ${what}: ${lasted(length)}`))),
      decided === null ? null : h("line", { x1: scale(decided), x2: scale(decided), y1: y - 2, y2: y + 17, class: "decision" }, h("title", {}, `checkpoint ${one.id} was decided after ${lasted(decided)}`)),
      h("text", { x: scale(total) + 6, y: y + 12 }, one.status === "FAILED" ? `✕ ${lasted(total)}` : lasted(total)));
  });
  return [
    h("div", { class: "legend" }, [["trigger", "trigger"], ["wait", "wait for its micro-batch"], ["alignment", "alignment"], ["sync", "staging (sync)"], ["async", "decision (async)"], ["decision", "decided"], ["commit", "commit, sink by sink"]].map(([kind, name]) =>
      h("span", {}, h("i", { class: `key ${kind}` }), name))),
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Timeline of checkpoints; the history below has the same numbers" },
      h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Timeline of ${measured.length} checkpoints, from the request on` }, ticks, rows)),
  ];
}

async function checkpointShown(id, number) {
  const one = await asked(`jobs/${id}/flinkish/checkpoints/${encodeURIComponent(number)}`);
  const base = `#/job/${id}/checkpoints`;
  const failure = one.failure ? [one.failure.reason, one.failure.text].filter(Boolean).join(": ") : null;
  return [
    h("p", {}, h("a", { href: base }, "All checkpoints")),
    h("h2", {}, `Checkpoint ${one.id} `, badge(one.status)),
    failure ? h("p", { class: "cause" }, failure) : null,
    h("div", { class: "sheet" }, facts([
      ["for", one.purpose.replace("_", " ").toLowerCase()], ["triggered", at(one.triggered_at_ms)], ["decided", at(one.decided_at_ms)], ["confirmed", at(one.confirmed_at_ms)],
      ["end to end", lasted(one.durations.end_to_end_ms)], ["rows", count(one.rows)], ["bytes staged", bytes(one.bytes_staged)],
      ["acknowledged", one.asked === null ? UNKNOWN : `${one.acknowledged} of ${one.asked}`], ["lineage", count(one.lineage)], ["micro-batch", count(one.batch)],
      ["owner", one.owner_epoch === null ? UNKNOWN : `epoch ${one.owner_epoch}`], ["go back to it", one.can_be_rewound_to ? "possible" : one.why_not],
    ])),
    h("div", { class: "sheet" }, gantt([one], base)),
    h("h2", {}, "Participants"),
    h("div", { class: "sheet" }, table("", [
      ["uid", (p) => p.uid, "wide"], ["kind", (p) => p.kind.toLowerCase()],
      ["acknowledged", (p) => p.is_acknowledged ? `✓ after ${lasted(p.ack_ms)}` : "✕ no"],
      ["rows", (p) => count(p.rows), "number"], ["bytes", (p) => bytes(p.bytes), "number"], ["staging", (p) => lasted(p.sync_ms), "number"],
      ["commit", (p) => lasted(p.commit_ms), "number"], ["barriers", (p) => count(p.barriers), "number"], ["late", (p) => count(p.late_dropped), "number"],
      ["answers", (p) => answers(one, p.uid)],
    ], one.participants, "Who took part is kept for the newest checkpoints only."), one.unlisted ? h("p", { class: "quiet" }, `${one.unlisted} more are not listed.`) : null),
    one.batches ? [h("h2", {}, "Micro-batches"), h("div", { class: "sheet" }, table("", [
      ["micro-batch", (b) => `${b.lineage}/${b.batch}`], ["owner", (b) => b.owner_epoch, "number"], ["attempt", (b) => b.attempt, "number"],
      ["rows", (b) => Object.entries(b.rows).map(([sink, n]) => `${sink} ${count(n)}`).join(", "), "wide"],
      ["committables", (b) => Object.entries(b.committables).map(([sink, n]) => `${sink} ${n}`).join(", "), "wide"],
    ], one.batches, ""))] : null,
    one.upstream && one.upstream.length ? [h("h2", {}, "Upstream"), h("div", { class: "sheet" }, table("", [
      ["topic", (u) => u.topic], ["job", (u) => h("code", {}, u.job_uuid), "wide"], ["checkpoint", (u) => u.checkpoint, "number"], ["alignment", (u) => lasted(u.alignment_ms), "number"],
    ], one.upstream, ""))] : null,
    one.group_offsets && Object.keys(one.group_offsets).length ? [h("h2", {}, "Group offsets"), h("div", { class: "sheet" }, table("", [
      ["group", ([group]) => group], ["topic", ([, topic]) => topic], ["partitions", ([, , offsets]) => Object.entries(offsets).map(([p, n]) => `${p}: ${count(n)}`).join(", "), "wide"],
    ], Object.entries(one.group_offsets).flatMap(([group, topics]) => Object.entries(topics).map(([topic, offsets]) => [group, topic, offsets])), ""))] : null,
  ];
}

function answers(one, uid) {
  const found = Object.entries((one.answers || {})[uid] || {});
  return found.map(([name, n]) => `${n} ${name.replace("_", " ").toLowerCase()}`).join(", ") || UNKNOWN;
}

// -- sinks, event time, restarts -------------------------------------------------------------------
async function sinksTab(id) {
  const { sinks } = await asked(`jobs/${id}/flinkish/sinks`);
  return [h("div", { class: "sheet" }, table("What each sink holds that readers do not see yet, and what they see", [
    ["sink", (one) => [one.uid, h("span", { class: "quiet" }, ` ${one.does || ""}`)], "wide"],
    ["rate", (one) => perSecond(one.rows_per_second), "number"],
    ["staged rows", (one) => count(one.staged_rows), "number"],
    ["decided, not confirmed", (one) => count(one.decided_rows), "number"],
    ["open transactions", (one) => count(one.open_committables), "number"],
    ["oldest open", (one) => one.oldest_open_ms === null ? UNKNOWN : lasted(one.oldest_open_ms), "number"],
    ["confirmed up to", (one) => one.confirmed_checkpoint === null ? UNKNOWN : h("a", { href: `#/job/${id}/checkpoints/show/${one.confirmed_checkpoint}` }, `checkpoint ${one.confirmed_checkpoint}`)],
    ["at", (one) => at(one.confirmed_at_ms)],
    ["rows in it", (one) => count(one.confirmed_rows), "number"],
    ["manifest", (one) => Object.entries(one.facts).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ") || UNKNOWN, "wide"],
  ], sinks, "The job has no sinks, or has not started yet.")),
  h("p", { class: "quiet" }, "An open transaction is whatever a sink has staged and not committed: a transaction of Kafka's, files that no table names yet. ",
    "It is committed with the checkpoint that holds it, or given up.")];
}

async function timeTab(id) {
  const found = await asked(`jobs/${id}/flinkish/watermarks`);
  const most = Math.max(1, ...found.operators.map((one) => one.lag_ms || 0));
  return [
    h("div", { class: "sheet" }, table("Watermarks of all operators side by side; the lag is behind the wall clock at that checkpoint", [
      ["operator", (one) => one.name, "wide"],
      ["watermark", (one) => one.is_at_end ? "end of all input" : at(one.watermark_ms)],
      ["lag", (one) => one.lag_ms === null ? UNKNOWN : [h("span", { class: "meter" }, h("i", { class: one.lag_ms > 60_000 ? "low" : "", "width%": Math.round(one.lag_ms / most * 100) })), lasted(one.lag_ms)], "wide"],
    ], found.operators, "The job has no event time, or no complete checkpoint yet.")),
    found.checkpoint ? h("p", { class: "quiet" }, `As of checkpoint ${found.checkpoint}, ${at(found.at_ms)}.`) : null,
  ];
}

async function restartsTab(id, job) {
  if (!job.failures.length) return h("p", { class: "none" }, "Nothing has failed, as far as is kept.");
  return [h("p", { class: "quiet" }, `${counted(job.restarts, "restart")} in all. The newest ${counted(job.failures.length, "cause")}:`),
    job.failures.map((one) => h("article", { class: "sheet" },
      h("p", { class: "cause" }, one.cause),
      h("p", { class: "quiet" }, `${at(one.at_ms)}${one.name ? ` · in ${one.name}` : ""} · attempt ${one.attempt}`)))];
}

// -- operating -------------------------------------------------------------------------------------
async function operateTab(id, job) {
  const [rewind, config, lineages, chained] = await Promise.all([asked(`jobs/${id}/flinkish/rewind`), asked("config"), asked(`jobs/${id}/flinkish/lineages`), asked(`jobs/${id}/flinkish/chained`)]);
  const running = ["RUNNING", "RESTARTING", "CREATED"].includes(job.status) || (job.was_cut_off && job.owner.life === "UNKNOWN");
  const can = config.features["web-cancel"];
  const target = h("input", { type: "text", id: "target", placeholder: "the server's --savepoint-dir", autocomplete: "off" });
  const drain = h("input", { type: "checkbox", id: "drain" });
  const choice = h("select", { id: "back-to" }, rewind.targets.map((one) => h("option", { value: one.checkpoint }, `${one.checkpoint}, ${at(one.triggered_at_ms)}`)));
  const tables = h("select", { id: "tables" }, h("option", { value: "KEEP" }, "tables keep their rows"), h("option", { value: "RESTORE" }, "tables are restored, too"));
  const savepoint = () => ({ "target-directory": target.value.trim() || null });
  const card = (title, text, ...children) => h("div", { class: "sheet" }, h("h3", {}, title), h("p", { class: "quiet" }, text), children);
  return [
    can ? null : h("p", { class: "badge" }, "This server only shows jobs."),
    running ? null : h("p", { class: "badge warn" }, `The job does not run (${job.status}): it can be sent back at its next start, and nothing else.`),
    h("div", { class: "row" }, h("label", { for: "target" }, "Savepoints go below"), target),
    h("div", { class: "cards" },
      card("Checkpoint", "Take one now, beside the timer.",
        act("Take a checkpoint", running && can, { id, job, title: "Take a checkpoint now?", text: "It is like those of the timer.", path: "checkpoints", body: () => ({}), state: "checkpoints", done: (r) => `checkpoint ${r.checkpointId} is confirmed` })),
      card("Savepoint", "A complete checkpoint in a directory of yours. The job goes on.",
        act("Take a savepoint", running && can, { id, job, title: "Take a savepoint?", text: "It is written below the directory that you gave. The job goes on.", path: "savepoints", body: savepoint, state: "savepoints", done: (r) => `savepoint: ${r.location}` })),
      card("Stop with a savepoint", "Nothing behind the savepoint is committed. If it fails the job runs on.",
        h("p", {}, h("label", {}, drain, " drain: event time comes to its end first")),
        act("Stop the job", running && can, { id, job, danger: true, title: "Stop the job with a savepoint?", text: "The job ends behind it. It can be started again from the savepoint.", path: "stop", body: () => ({ targetDirectory: target.value.trim() || null, drain: drain.checked }), state: "savepoints", done: (r) => `stopped; savepoint: ${r.location}` })),
      card("Cancel", "End at once, without a last checkpoint. The next start goes on from the newest one.",
        act("Cancel the job", running && can, { id, job, danger: true, title: "Cancel the job?", text: "It ends without a last checkpoint. What it staged is given up or finished by the next start.", method: "PATCH", path: "?mode=cancel", done: () => "the job is being cancelled" })),
      card("Go back", "To an earlier checkpoint. Every later one is left behind for good; savepoints stay.",
        rewind.order ? h("p", { class: "badge warn" }, `An order to go back to checkpoint ${rewind.order.checkpoint} waits.`) : null,
        rewind.targets.length ? h("p", { class: "row" }, h("label", {}, "to checkpoint ", choice), tables) : h("p", { class: "none" }, "There is no checkpoint that it can go back to."),
        act("Go back", can && rewind.targets.length > 0 && !rewind.order, { id, job, danger: true, title: () => `Go back to checkpoint ${choice.value}?`, text: "State, and the positions of sources, become what they were then. Later checkpoints are left behind for good; topics keep what was committed since.", path: "flinkish/rewind", body: () => ({ checkpoint: Number(choice.value), tables: tables.value }), state: "flinkish/rewind", done: (r) => r.text || r.outcome })),
      card("Token", sessionStorage.getItem(TOKEN) ? "This tab has a token; changes are sent with it." : "Changes need the token that was shown when the server started.",
        h("button", { onclick: () => askToken() }, sessionStorage.getItem(TOKEN) ? "Give another token" : "Give the token"))),
    h("h2", {}, "Lineages"),
    h("div", { class: "sheet" }, table(`The job is in lineage ${lineages.live}`, [
      ["lineage", (one) => one.lineage, "number"], ["began by", (one) => one.kind.replace("_", " ").toLowerCase()],
      ["at checkpoint", (one) => count(one.checkpoint), "number"], ["first micro-batch again", (one) => count(one.first_removed), "number"],
    ], lineages.rewinds, "It was never sent back.")),
    chained.upstream.length + chained.downstream.length ? [h("h2", {}, "Chained jobs"), h("div", { class: "sheet" }, table("", [
      ["", ([way]) => way], ["job", ([, one]) => one.id ? h("a", { href: `#/job/${one.id}/graph` }, one.name) : h("code", {}, one.job_uuid), "wide"],
      ["topic", ([, one]) => one.topic], ["upstream checkpoint", ([, one]) => one.upstream_checkpoint, "number"],
    ], [...chained.upstream.map((one) => ["reads from", one]), ...chained.downstream.map((one) => ["is read by", one])], ""))] : null,
  ];
}

/** A button that asks before it does something. */
function act(name, enabled, what) {
  return h("button", { class: what.danger ? "danger" : "", disabled: !enabled, onclick: () => confirmThen(name, what) }, name);
}

function confirmThen(name, what) {
  const title = typeof what.title === "function" ? what.title() : what.title;
  const body = what.body && what.body();
  const dialog = document.getElementById("ask");
  dialog.replaceChildren(h("form", { method: "dialog" }, h("h2", {}, title), h("p", {}, h("strong", {}, what.job.name), ": ", what.text),
    h("div", { class: "row" }, h("button", { value: "no" }, "No"), h("button", { value: "yes", class: what.danger ? "danger" : "main" }, `Yes, ${name.toLowerCase()}`))));
  dialog.onclose = () => { if (dialog.returnValue === "yes") carryOut(name, what, body); dialog.returnValue = ""; };
  dialog.showModal();
}

function askToken() {
  const dialog = document.getElementById("ask"), field = h("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
  dialog.replaceChildren(h("form", { method: "dialog" }, h("h2", {}, "The server's token"), h("p", {}, "It stays in this tab."), field,
    h("div", { class: "row" }, h("button", { value: "no" }, "Not now"), h("button", { value: "yes", class: "main" }, "Use it"))));
  dialog.onclose = () => {
    if (dialog.returnValue === "yes" && field.value) sessionStorage.setItem(TOKEN, field.value.trim());
    dialog.returnValue = "";
    show();
  };
  dialog.showModal();
}

async function carryOut(name, what, body) {
  const text = h("p", {}, `${name}: asked …`);
  const box = h("div", { class: "sheet" }, text, h("button", { class: "link", onclick: () => box.remove() }, "Close"));
  document.getElementById("news").append(box);
  const base = `jobs/${what.id}`;
  try {
    const url = what.path.startsWith("?") ? base + what.path : `${base}/${what.path}`;
    const begun = await asked(url, what.method || "POST", body);
    if (!what.state) { text.textContent = `✓ ${what.done({})}`; return; }
    for (;;) {
      const { status, operation } = await asked(`${base}/${what.state}/${begun["request-id"]}`);
      if (status.id === "COMPLETED") {
        const cause = operation && operation["failure-cause"];
        text.textContent = cause ? `✕ ${name}: ${cause["stack-trace"]}` : `✓ ${what.done(operation || {})}`;
        break;
      }
      text.textContent = `… ${name}: under way`;
      await new Promise((resolve) => setTimeout(resolve, 500));
    }
  } catch (error) {
    text.textContent = `✕ ${name}: ${error.message}`;
    if (error.status === 401) askToken();
  }
  show();
}

// -- which part is shown, and keeping it so ---------------------------------------------------------
let listening = null, listenedTo = "", drawing = 0, again = false;

/** Draw what the address says; a field that somebody is in stays as it is. */
async function show() {
  if (drawing) { again = true; return; }
  drawing = 1;
  const [, kind, id, tab = "graph", ...rest] = location.hash.split("/");
  const main = document.getElementById("main");
  try {
    const content = kind === "job" && /^[0-9a-f]{32}$/.test(id) ? await oneJob(id, tab, rest) : await allJobs();
    if (kind !== "job") { document.getElementById("crumbs").replaceChildren(); document.title = "flinkish_spark"; }
    await released;
    put(main, content);
  } catch (error) {
    const said = error instanceof Refused ? error.message : "The server does not answer.";
    if (!main.children.length || error instanceof Refused) put(main, [h("h1", {}, "This cannot be shown"), h("p", {}, said), h("p", {}, h("a", { href: "#/" }, "All jobs"),
      error.status === 401 ? [" ", h("button", { onclick: askToken }, "Give the token")] : null)]);
  }
  follow(kind === "job" ? `jobs/${id}/flinkish/events` : "flinkish/events");
  drawing = 0;
  if (again) { again = false; show(); }
}

// Between press and release nothing is drawn: a button that was replaced meanwhile is not clicked. Only of what can be
// clicked: a browser may not tell of the release of a scroll bar, and the page would stand still.
let released = Promise.resolve(), release = null;
function hold(event) {
  if (!release && event.target.closest?.("button, a, input, select, label, summary")) released = new Promise((done) => { release = done; });
}
// Behind the click, which comes with the release.
function letGo() { setTimeout(() => { if (release) release(); release = null; }); }
for (const event of ["pointerdown", "keydown"]) addEventListener(event, hold, true);
for (const event of ["pointerup", "pointercancel", "contextmenu", "keyup"]) addEventListener(event, letGo, true);
// Of the window, which hears of no release then; those of fields do not come here.
addEventListener("blur", letGo);

/** Put the content there with what was scrolled, typed and focused; nothing is drawn under an open field. */
function put(main, content) {
  const active = document.activeElement, typed = new Map();
  for (const field of main.querySelectorAll("input, select")) if (field.id) typed.set(field.id, field.type === "checkbox" ? field.checked : field.value);
  const scrolled = [...main.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const focused = active && main.contains(active) ? active.id || pathTo(main, active) : null;
  main.replaceChildren(...[content].flat(9).filter(Boolean));
  for (const [id, value] of typed) {
    const field = document.getElementById(id);
    if (field && field.type === "checkbox") field.checked = value;
    else if (field && value) field.value = value;
  }
  main.querySelectorAll(".scroll").forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
  const target = typeof focused === "string" ? document.getElementById(focused) : focused && atPath(main, focused);
  if (target) target.focus({ preventScroll: true });
}

function pathTo(root, node) {
  const path = [];
  for (; node !== root; node = node.parentNode) path.unshift([...node.parentNode.children].indexOf(node));
  return path;
}

const atPath = (root, path) => path.reduce((node, place) => node && node.children[place], root);

function follow(path) {
  if (path === listenedTo) return;
  if (listening) listening.abort();
  listening = new AbortController();
  listenedTo = path;
  const live = document.getElementById("live");
  listen(path, listening.signal, show, (isOn) => {
    live.className = isOn ? "on" : "off";
    live.textContent = isOn ? "live" : "the server does not answer";
  });
}

takeToken();
addEventListener("hashchange", () => { takeToken(); show().then(() => scrollTo(0, 0)); });
show();
setInterval(() => { if (!document.hidden) show(); }, 15_000);
