"use strict";
// The status page: polls the REST interface and draws what it says. Everything that comes from a job (names, errors, stacks)
// is inserted as text, never as markup. With no answer the last picture stays, with a line that says how old it is.

const POLL_MS = 1500;
const REQUEST_TIMEOUT_MS = 8000;
const MAX_EVENTS = 300;
const MAX_RANKS_SHOWN = 256;

const byId = (id) => document.getElementById(id);
let place = readPlace();
let answeredAt = null;
let events = [];
let eventCursor = null;
let jobPages = 1;
let timer = null;
let round = 0;

// ------------------------------------------------------------------------------------------------ elements

// Control characters and overrides of the writing direction would show as boxes, or make text read as what it is not.
const shown = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, " ");

function element(tag, { text, cls, title } = {}, children = []) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = shown(text);
  if (cls) node.className = cls;
  if (title) node.title = title;
  node.append(...children);
  return node;
}

function cell(text, cls) {
  return element("td", { text: text === null || text === undefined || text === "" ? "–" : text, cls });
}

// ------------------------------------------------------------------------------------------------ words

function duration(seconds) {
  if (seconds === null || seconds === undefined || seconds < 0) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [big, small, unit, part] of [[86400, 3600, "d", "h"], [3600, 60, "h", "min"], [60, 1, "min", "s"]]) {
    if (whole >= big) {
      const rest = Math.floor((whole % big) / small);
      return `${Math.floor(whole / big)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
    }
  }
  return `${whole} s`;
}

const millis = (time) => (time ? Date.parse(time) : null);
const clock = (time) => (time ? time.slice(11, 19) : "–");
const dated = (time) => (time ? `${time.slice(0, 10)} ${time.slice(11, 19)}Z` : "–");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const stateOf = (job) => job.outcome || job.state;

// The stand-in of a rank without a GPU has a long name that says nothing to people.
const shortDevice = (device) => (device && device.startsWith("CPU-") ? "CPU" : device);

function endOfRank(rank) {
  if (rank.signal) return `signal ${rank.signal}`;
  return rank.exit_code === null ? "" : `exit ${rank.exit_code}`;
}

// ------------------------------------------------------------------------------------------------ where we are

function readPlace() {
  const parts = new URLSearchParams(location.hash.slice(1));
  return { job: parts.get("job"), owner: parts.get("owner") || "", cluster: parts.get("cluster") || "" };
}

function jobLink(job) {
  return `#${new URLSearchParams({ job: `${job.id}.${job.run}`, owner: job.owner, cluster: job.cluster })}`;
}

function jobPath(rest = "", query = {}) {
  const parts = new URLSearchParams({ owner: place.owner, cluster: place.cluster, ...query });
  return `/api/v1/jobs/${encodeURIComponent(place.job)}${rest}?${parts}`;
}

// ------------------------------------------------------------------------------------------------ asking

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS), credentials: "same-origin", cache: "no-store" });
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, content.detail || `status ${answer.status}`);
  return content;
}

function showNotice(text) {
  byId("notice").hidden = !text;
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
}

function showLink(live, text) {
  byId("link").className = `link ${live ? "live" : "lost"}`;
  byId("link").textContent = text;
}

function failed(error) {
  const since = answeredAt ? `no answer since ${dated(answeredAt.toISOString())}` : "no answer yet";
  if (!(error instanceof Refused)) {
    showLink(false, since);
    showNotice(`The supervisor gives ${since}. Training does not depend on it; \`rsup status\` reads the store meanwhile.`);
  } else if (error.status === 401) {
    showLink(false, "not signed in");
    showNotice("Not signed in: open this page with ?token=… and the token in the file `token` of the state directory (`rsup status --page` prints that address).");
  } else {
    showLink(error.status < 500, error.status < 500 ? "live" : since);
    showNotice(error.message);
  }
}

async function poll() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    if (!document.hidden) {
      const drawing = place.job ? await askJob() : await askJobs();
      if (mine !== round) return;
      drawing();
      answeredAt = new Date();
      showLink(true, "live");
      showNotice("");
    }
  } catch (error) {
    if (mine !== round) return;
    failed(error);
  }
  timer = setTimeout(poll, POLL_MS);
}

// ------------------------------------------------------------------------------------------------ the jobs

async function askJobs() {
  const who = await ask("/api/v1/supervisor");
  let items = [];
  let cursor = "";
  for (let number = 0; number < jobPages && cursor !== null; number++) {
    const page = await ask(`/api/v1/jobs?limit=50&cursor=${encodeURIComponent(cursor)}`);
    items = items.concat(page.items);
    cursor = page.next_cursor;
  }
  return () => drawJobs(who, items, cursor !== null);
}

function drawJobs(who, items, more) {
  document.title = "rsup";
  drawSupervisor(who.supervisor);
  byId("no-jobs").hidden = items.length > 0;
  byId("older").hidden = !more;
  byId("jobs").replaceChildren(...items.map(jobCard));
}

function drawSupervisor(supervisor) {
  byId("where").textContent = `${supervisor.host}, supervisor ${supervisor.pid}${supervisor.embedded ? " (embedded)" : ""}`;
}

function jobCard(job) {
  const meta = [element("span", { text: job.owner })];
  const readable = job.created !== undefined;
  if (readable) {
    const ended = millis(job.ended) || Date.now();
    if (job.iteration) meta.push(element("span", { text: `iteration ${job.iteration}` }));
    meta.push(element("span", { text: plural(job.num_attempts, "attempt") }));
    if (job.num_incidents) meta.push(element("span", { text: plural(job.num_incidents, "incident") }));
    meta.push(element("span", { text: dated(job.created) }));
    meta.push(element("span", { text: duration((ended - millis(job.created)) / 1000) }));
    if (job.reason && job.ended) meta.push(element("span", { text: job.reason }));
  }
  const card = element(readable ? "a" : "div", { cls: "job" }, [
    element("b", { text: job.name }),
    element("span", { text: stateOf(job), cls: `state ${stateOf(job)}` }),
    element("span", { cls: "meta" }, meta),
  ]);
  if (readable) card.href = jobLink(job);
  return card;
}

// ------------------------------------------------------------------------------------------------ one job

async function askJob() {
  const first = eventCursor === null;
  const query = first ? { last: "100" } : { cursor: String(eventCursor), limit: "500" };
  const [status, news] = await Promise.all([ask(jobPath("", { stacks: "false" })), ask(jobPath("/events", query))]);
  return () => {
    events = events.concat(news.items).slice(-MAX_EVENTS);
    eventCursor = events.length ? events[events.length - 1].number : 0;
    drawJob(status);
    if (news.items.length || first) drawEvents();
  };
}

function drawJob(status) {
  const job = status.job;
  document.title = `${shown(job.name)} · rsup`;
  drawSupervisor(status.supervisor);
  byId("job-name").textContent = shown(job.name);
  byId("job-state").textContent = stateOf(job);
  byId("job-state").className = `state ${stateOf(job)}`;
  byId("job-reason").textContent = shown(job.reason || job.waiting_for || "");
  byId("command").textContent = shown(job.command);
  drawFacts(status);
  drawWork(status);
  drawTime(status.goodput);
  drawSuspects(status.suspects);
  drawStragglers(status.stragglers);
  drawCurves(status.curves || []);
  drawTimeline(status);
  drawRanks(status.ranks, job);
  drawIncidents(status.incidents, status.counts.incidents);
  drawCases(status.cases, status.counts.cases);
  drawSections(status.sections);
}

function drawFacts({ job, goodput, work, counts }) {
  const saved = work.durable;
  const facts = [
    ["iteration", job.iteration || "–", ""],
    ["goodput", goodput.ratio === null ? "–" : `${(goodput.ratio * 100).toFixed(1)} %`, ""],
    ["attempt", job.attempt || "–", restarts(counts)],
    ["ranks", job.num_ranks, `on ${plural(job.num_nodes, "node")}${job.num_spares ? `, ${plural(job.num_spares, "spare")}` : ""}`],
    [job.ended ? "ran for" : "running for", duration(goodput.wall_s), ""],
    atRisk(job, work),
    ["last checkpoint", saved ? saved.iteration : "–", saved ? clock(saved.at) : ""],
    ["owner", job.owner, job.cluster === "local" ? "" : job.cluster],
  ];
  byId("facts").replaceChildren(...facts.map(([name, value, note]) => element("div", {}, [
    element("dt", { text: name }),
    element("dd", { text: `${value} ` }, [element("small", { text: note })]),
  ])));
}

function atRisk(job, { at_risk: risk, durable }) {
  const note = risk && risk.about_s ? `≈ ${duration(risk.about_s)}` : risk && !durable && !risk.since_iteration ? "none is saved" : "";
  return [job.ended ? "iterations not saved" : "iterations at risk", risk ? risk.iterations : "–", note];
}

// Saves, in-process restarts, why the ranks left: a line each, of what there is to say.
function drawWork({ work, in_process: again, left }) {
  const lines = [];
  if (work.local) lines.push([`newest local checkpoint: iteration ${work.local.iteration} at ${clock(work.local.at)}`, ""]);
  if (work.saving) lines.push([`a save of iteration ${work.saving.iteration} has been under way for ${duration(work.saving.for_s)}`, ""]);
  if (work.failed) lines.push([`the save of iteration ${work.failed.iteration} failed at ${clock(work.failed.at)}: ${work.failed.text}`, "warn"]);
  if (again.last) {
    const before = again.restarts_in_all - again.restarts;
    const count = `${again.restarts} in attempt ${again.attempt}${before ? ` and ${before} before` : ""}`;
    lines.push([`in-process restarts: ${count}; the last at ${clock(again.last.at)} took ${duration(again.last.took_s)}: ${again.last.why}`, ""]);
  }
  if (again.under_way) lines.push([`an in-process restart is under way since ${clock(again.under_way.since)}: ${again.under_way.why}`, "warn"]);
  if (left) {
    const saved = left.durable ? "after a durable save" : "without a durable save";
    const how = left.kind === "finished" ? "training is finished" : `the ranks left on purpose after iteration ${left.iteration}`;
    lines.push([`${how}, ${saved}: ${left.reason || left.kind}`, left.durable ? "" : "warn"]);
  }
  byId("work").replaceChildren(...lines.map(([text, cls]) => element("li", { text, cls })));
}

const PART_NAMES = {
  productive: "training that was kept", lost: "work done again", checkpoint: "standing still for saves", rerun: "reruns",
  hang: "hangs until judged", in_process_restart: "in-process restarts", restart: "restarts", startup: "start-up",
  waiting: "waiting for nodes", ending: "ending", uncounted: "no iterations shown",
};

function drawTime({ wall_s: wall, parts }) {
  const known = Object.keys(PART_NAMES).filter((name) => parts[name] > 0);
  const unknown = Object.keys(PART_NAMES).filter((name) => parts[name] === null);
  byId("time-part").hidden = !wall || known.length === 0;
  byId("time-note").textContent = unknown.length ? `unknown: ${unknown.map((name) => PART_NAMES[name]).join(", ")}` : "";
  if (!wall) return;
  let from = 0;
  byId("time-bar").replaceChildren(...known.map((name) => {
    const piece = bar(`part-${name}`, from, from + parts[name], wall, `${PART_NAMES[name]}: ${duration(parts[name])}`);
    from += parts[name];
    return piece;
  }));
  byId("time").replaceChildren(...known.map((name) => element("li", {}, [
    element("span", { cls: `key part-${name}` }), element("b", { text: PART_NAMES[name] }),
    element("span", { text: duration(parts[name]) }), element("small", { text: `${(parts[name] * 100 / wall).toFixed(1)} %` }),
  ])));
}

function restarts({ attempts, free_restarts: free }) {
  const all = attempts - 1;
  if (all <= 0) return "";
  if (!free) return plural(all, "restart");
  return all > free ? `${plural(all - free, "restart")}, ${free} free` : plural(free, "free restart");
}

function drawSuspects(suspects) {
  byId("suspects").hidden = suspects.length === 0;
  byId("suspects").textContent = shown(suspects.map((one) =>
    `Looks stuck: ${one.text}${one.node ? `, on ${one.node}` : ""} (nothing was killed)`).join("\n"));
}

function drawStragglers(found) {
  const now = found ? found.episodes.filter((one) => one.goes_on) : [];
  byId("stragglers").hidden = now.length === 0;
  byId("stragglers").textContent = shown(now.map((one) => `Straggler: ${one.text} (since iteration ${one.first_iteration})`).join("\n"));
}

// ------------------------------------------------------------------------------------------------ curves

const CURVE_WIDTH = 320;
const CURVE_HEIGHT = 96;
const UNITS = { "iteration-time": " s" };
let curvesDrawn = "";

function vector(tag, attributes, children = []) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(3);
  return String(Number(value.toPrecision(5)));
}

function drawCurves(curves) {
  const drawn = curves.filter((one) => one.points.length);
  byId("curves-part").hidden = drawn.length === 0;
  const content = JSON.stringify([place, drawn]);
  if (!drawn.length || content === curvesDrawn) return; // drawn anew they would lose what the mouse points at
  curvesDrawn = content;
  const last = drawn[0].points[drawn[0].points.length - 1];
  byId("curves-note").textContent = `up to iteration ${last[0]}`;
  byId("curves").replaceChildren(...drawn.map(curveCard));
}

// Points: iteration, time, value, lowest, highest, first iteration, how many were not finite. A value is the mean of its
// stretch and stands at the middle of it; the band shows what lies in points that stand for several iterations. An older
// supervisor does not say where a stretch begins.
const firstOf = (point) => point[5] ?? point[0];
const middleOf = (point) => (firstOf(point) + point[0]) / 2;
const isOdd = (point) => point[2] === null || (point[6] ?? 0) > 0;

function curveCard({ name, points, num_non_finite: bad, newest, holes = [] }) {
  const known = points.filter((one) => one[2] !== null);
  const low = Math.min(...known.map((one) => one[3]));
  const high = Math.max(...known.map((one) => one[4]));
  const last = points[points.length - 1];
  const value = newest ? newest.value : last[2];
  const head = element("p", {}, [element("b", { text: name }), element("span", { text: number(value) + (value === null ? "" : UNITS[name] || "") })]);
  const foot = element("p", { cls: "meta" }, [
    element("span", { text: `iteration ${firstOf(points[0])}` }),
    element("span", { text: bad ? `${bad} not finite` : "", cls: bad ? "bad" : "" }),
    element("span", { text: last[0] > firstOf(points[0]) ? String(last[0]) : "" }),
  ]);
  const card = element("figure", { cls: "curve" }, [head]);
  if (known.length) {
    const range = element("p", { cls: "meta range" }, [element("span", { text: `${number(low)} to ${number(high)}` })]);
    card.append(range, curve(points, holes, low, high));
  }
  card.append(foot);
  return card;
}

function curve(points, holes, low, high) {
  const first = firstOf(points[0]);
  const span = Math.max(1, points[points.length - 1][0] - first);
  const across = (iteration) => points[points.length - 1][0] > first ? (iteration - first) * CURVE_WIDTH / span : CURVE_WIDTH / 2;
  const x = (one) => across(middleOf(one));
  const y = (value) => high > low ? CURVE_HEIGHT - 3 - (value - low) * (CURVE_HEIGHT - 6) / (high - low) : CURVE_HEIGHT / 2;
  const at = (one, value) => `${x(one).toFixed(1)},${y(value).toFixed(1)}`;
  const picture = vector("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  for (const run of runsOf(points, holes)) {
    if (run.some((one) => one[3] < one[4])) {
      const outline = [...run.map((one) => at(one, one[4])), ...[...run].reverse().map((one) => at(one, one[3]))];
      picture.append(vector("polygon", { class: "band", points: outline.join(" ") }));
    }
    const alone = run.length === 1 ? [run[0], run[0]] : run;
    picture.append(vector("polyline", { class: alone === run ? "line" : "line dot", points: alone.map((one) => at(one, one[2])).join(" ") }));
  }
  for (const gap of oddStretches(points)) {
    picture.append(vector("path", { class: "gap", d: `M${across(gap[0]).toFixed(1)} 0V${CURVE_HEIGHT}H${across(gap[1]).toFixed(1)}V0Z` }));
  }
  const title = vector("title", {});
  picture.append(title);
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = first + (event.clientX - box.left) * span / Math.max(1, box.width);
    const near = points.reduce((best, one) => Math.abs(middleOf(one) - wanted) < Math.abs(middleOf(best) - wanted) ? one : best);
    const which = firstOf(near) < near[0] ? `iterations ${firstOf(near)} to ${near[0]}` : `iteration ${near[0]}`;
    title.textContent = `${which}, ${clock(new Date(near[1] / 1000).toISOString())}: ${number(near[2])}`;
  });
  return picture;
}

// The curve is cut where something was not finite, and in holes, of which nobody told anything. A point that stands for some
// finite and some other values is alone.
function runsOf(points, holes) {
  const runs = [[]];
  for (const one of points) {
    const run = runs[runs.length - 1];
    const before = run[run.length - 1];
    const isOver = before && holes.some(([from, to]) => before[0] < from && to < firstOf(one));
    if (isOver || isOdd(one)) runs.push([]);
    if (one[2] !== null) runs[runs.length - 1].push(one);
    if (isOdd(one)) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

// First and last iteration of what was not finite; neighbours as one.
function oddStretches(points) {
  const found = [];
  points.forEach((one, at) => {
    if (!isOdd(one)) return;
    if (at && isOdd(points[at - 1])) found[found.length - 1][1] = one[0];
    else found.push([firstOf(one), one[0]]);
  });
  return found;
}

function bar(cls, from, to, span, title) {
  const node = element("i", { cls, title });
  node.style.left = `${Math.max(0, from) * 100 / span}%`;
  if (to !== null) node.style.width = `${Math.max(0, to - Math.max(0, from)) * 100 / span}%`;
  return node;
}

function drawTimeline({ job, attempts, incidents, checkpoints }) {
  const begin = millis(job.created);
  const end = millis(job.ended) || Date.now();
  const span = Math.max(1, end - begin);
  const lanes = attempts.slice(-12).map((attempt) => {
    const started = millis(attempt.started) - begin;
    const stopped = (millis(attempt.stopped) || end) - begin;
    const step = attempt.first_step ? millis(attempt.first_step) - begin : stopped;
    const track = element("div", { cls: "track" });
    track.append(bar("start", started, step, span, `attempt ${attempt.attempt} starts at ${dated(attempt.started)}`));
    if (step < stopped) {
      const range = `iterations ${attempt.start_iteration + 1}–${attempt.last_iteration}`;
      track.append(bar("step", step, stopped, span, `${attempt.outcome}, ${range}, ${duration((stopped - step) / 1000)}`));
    }
    for (const save of checkpoints.filter((one) => one.attempt === attempt.attempt)) {
      track.append(bar("save", millis(save.at) - begin, null, span, `checkpoint of iteration ${save.iteration}`));
    }
    for (const incident of incidents.filter((one) => one.attempt === attempt.attempt)) {
      const soft = incident.kind === "suspected-hang" ? " soft" : "";
      const at = millis(incident.at) - begin;
      const until = incident.in_process ? millis(incident.recovered) - begin : stopped;
      if (!soft && at < until) track.append(bar("lost", at, until, span, incident.text));
      track.append(bar(`mark${soft}`, at, null, span, `${clock(incident.at)} ${incident.text}`));
    }
    return element("div", { cls: "lane" }, [element("span", { text: `attempt ${attempt.attempt}` }), track]);
  });
  byId("timeline-part").hidden = lanes.length === 0;
  lanes.push(element("div", { cls: "axis" }, [
    element("span", { text: clock(job.created) }),
    element("span", { text: duration(span / 1000) }),
    element("span", { text: job.ended ? clock(job.ended) : "now" }),
  ]));
  byId("timeline").replaceChildren(...lanes);
}

function drawRanks(ranks, job) {
  const worst = (rank) => (rank.exit_code ? 1e9 : 0) + (rank.beat_age_s || 0);
  const shown = ranks.length > MAX_RANKS_SHOWN ? [...ranks].sort((a, b) => worst(b) - worst(a)).slice(0, MAX_RANKS_SHOWN) : ranks;
  byId("ranks-note").textContent = shown.length < ranks.length ? `${shown.length} of ${ranks.length}, oldest beats first` : "";
  const rows = shown.map((rank) => {
    const open = rank.open_sections.map((one) => `${one.name} ${duration(one.age_s)}`).join(", ");
    const cls = rank.exit_code ? "bad" : rank.beat_age_s > 5 && job.state === "running" ? "warn" : "";
    return element("tr", { cls }, [
      cell(rank.rank, "n"), cell(rank.node), cell(shortDevice(rank.device), "wide"), cell(rank.iteration || "", "n"), cell(open),
      cell(duration(rank.beat_age_s), "n"), cell(rank.pid, "n wide"), cell(endOfRank(rank)),
    ]);
  });
  if (!rows.length) {
    const none = element("td", { text: job.state === "ended" ? "no rank was ever started" : "no ranks yet", cls: "none" });
    none.colSpan = 8;
    rows.push(element("tr", {}, [none]));
  }
  byId("ranks").replaceChildren(...rows);
}

function drawIncidents(incidents, count) {
  byId("incidents-part").hidden = incidents.length === 0;
  byId("incidents-note").textContent = count > incidents.length ? `the newest ${incidents.length} of ${count}` : "";
  const open = new Set([...document.querySelectorAll("#incidents details[open]")].map((node) => node.dataset.incident));
  const known = new Map([...document.querySelectorAll("#incidents details")].map((node) => [node.dataset.incident, node]));
  byId("incidents").replaceChildren(...[...incidents].reverse().map((one) => incidentCard(one, known.get(String(one.incident)), open)));
}

function howSoon(one) {
  if (one.kind.endsWith("hang")) return `stood still for ${duration(one.detection_s)} before it was found`;
  return one.detection_s < 0.001 ? "noticed at once" : `noticed after ${duration(one.detection_s)}`;
}

function incidentCard(one, details) {
  const where = [one.rank === null ? null : `rank ${one.rank}`, one.node, shortDevice(one.device)].filter(Boolean).join(" · ");
  const facts = [
    `${dated(one.at)}, attempt ${one.attempt}`,
    where,
    one.iteration ? `iteration ${one.iteration}` : null,
    one.found_by ? `found by ${one.found_by}` : null,
    one.detection_s === null ? null : howSoon(one),
    one.recovery_s === null ? null : `recovered in ${duration(one.recovery_s)}`,
    one.lost_iterations === null ? null : `${plural(one.lost_iterations, "iteration")} lost`,
    one.victims.length ? `waiting for it: ${one.victims.length > 16 ? plural(one.victims.length, "rank") : `rank ${one.victims.join(", ")}`}` : null,
  ];
  const card = element("div", { cls: `incident${one.kind === "suspected-hang" ? " soft" : ""}` }, [
    element("p", {}, [element("b", { text: one.kind }), ` ${one.text}`]),
    element("p", { cls: "meta", text: facts.filter(Boolean).join(" · ") }),
  ]);
  if (one.num_stacks) card.append(details || stacksOf(one));
  return card;
}

function stacksOf(incident) {
  const details = element("details", {}, [element("summary", { text: plural(incident.num_stacks, "stack") })]);
  details.dataset.incident = String(incident.incident);
  details.addEventListener("toggle", async () => {
    if (!details.open || details.querySelector("pre")) return;
    try {
      const found = await ask(jobPath("/stacks", { incident: String(incident.incident) }));
      for (const stack of found.stacks) details.append(element("pre", { text: `ranks ${(stack.ranks || []).join(", ")} (${stack.source})\n${stack.text}` }));
    } catch (error) {
      details.append(element("p", { text: error.message, cls: "meta" }));
    }
  });
  return details;
}

function drawCases(cases, count) {
  byId("cases-part").hidden = cases.length === 0;
  byId("cases-note").textContent = count > cases.length ? `the newest ${cases.length} of ${count}` : "";
  byId("cases").replaceChildren(...[...cases].reverse().map((one) => {
    const open = one.waits_for_resume ? "open, for --resume" : "open";
    const verdict = one.verdict ? `${one.verdict}${one.data_dependent ? " (data-dependent)" : ""}` : open;
    const named = one.verdict === "application" ? "" : one.accused.map(shortDevice).join(", ");
    const accused = named && one.suspect_of > 1 ? `1 of ${one.suspect_of}: ${named}` : named;
    return element("tr", { cls: one.verdict === "persistent" ? "bad" : one.verdict ? "" : "warn", title: findingsOf(one) }, [
      cell(dated(one.opened)), cell(one.iteration, "n"), cell(`${verdict}${one.injected ? " [injected]" : ""}`), cell(accused),
      cell(one.action), cell(duration(one.took_s), "n"), whyCell(one),
    ]);
  }));
}

function whyCell(one) {
  const more = one.findings.length > 1 ? ` (and ${one.findings.length - 1} more)` : "";
  const lines = [one.reason, one.note, one.findings.length ? compared(one.findings[0]) + more : ""].filter(Boolean);
  return element("td", { cls: "why" }, lines.map((text, index) => element(index ? "small" : "span", { text })));
}

function compared(found) {
  const there = found.elsewhere ? `, ${found.elsewhere} on ${shortDevice(found.elsewhere_device) || "another device"}` : "";
  const how = found.in_place === found.initial ? `${found.in_place} again` : `then ${found.in_place}`;
  const again = found.in_place ? `, ${how} in place` : "";
  return `rank ${found.rank} on ${shortDevice(found.device)}, ${found.check}: ${found.initial}${again}${there}`;
}

function findingsOf(one) {
  return one.findings.slice(0, 8).map(compared).join("\n");
}

function drawSections(sections) {
  byId("sections-part").hidden = sections.length === 0;
  byId("sections").replaceChildren(...sections.map((one) => element("tr", {}, [
    cell(one.section),
    cell(one.limit_s === null ? "none" : `${duration(one.limit_s)}${one.calculated ? " (calculated)" : ""}`, "n"),
    cell(duration(one.longest_s), "n"),
    cell(one.times, "n"),
  ])));
}

function drawEvents() {
  const items = [...events].reverse().map((one) => element("li", {}, [
    element("time", { text: clock(one.at), title: dated(one.at) }),
    element("span", { text: one.text || one.kind, cls: one.level }),
  ]));
  byId("events").replaceChildren(...(items.length ? items : [element("li", { text: "no events yet", cls: "none" })]));
}

// ------------------------------------------------------------------------------------------------ start

function goTo() {
  place = readPlace();
  events = [];
  eventCursor = null;
  byId("jobs-view").hidden = Boolean(place.job);
  byId("job-view").hidden = !place.job;
  byId("incidents").replaceChildren();
  scrollTo(0, 0);
  poll();
}

byId("older").addEventListener("click", () => { jobPages += 1; poll(); });
addEventListener("hashchange", goTo);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
goTo();
