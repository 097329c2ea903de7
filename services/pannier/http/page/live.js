// The live picture: what the status says, once a second, and what has changed since the second before.
import { ask } from "./api.js";

const EVERY_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 620, ROW = 26, LEFT = { x: 10, width: 250 }, RIGHT = { x: 360, width: 250 };
let before = null;

async function look() {
  try {
    const status = await (await ask("/status")).json();
    show(status, before, performance.now());
    before = { status, at: performance.now() };
  } catch (error) {
    setState("unreachable", "bad");
    text("bottleneck", error.message);
  }
  setTimeout(look, EVERY_MS);
}

function show(status, last, now) {
  text("model", status.model);
  setState(status.ready ? "ready" : "not ready", status.ready ? "good" : "bad");
  const { running, waiting } = status.requests;
  text("requests", `${running} running, ${waiting} waiting`);
  const lanes = status.lanes.map((lane) => lapse(lane, last, now));
  const rows = rowsPerSecond(status, last, now);
  text("speed", rows === null ? "" : `${Math.round(rows)} rows/s`);
  text("bottleneck", bottleneck(lanes, status));
  draw(status, lanes);
}

// Of one lane since the last look, the shares of time in which its worker computed, or waited in the open.
function lapse(lane, last, now) {
  const old = last?.status.lanes.find((each) => each.worker === lane.worker && each.lane === lane.lane);
  const seconds = last ? (now - last.at) / 1000 : 1;
  const since = (name) => Math.max(0, (lane.seconds[name] ?? 0) - (old?.seconds[name] ?? 0)) / seconds;
  return {
    worker: lane.worker,
    lane: lane.lane,
    steps: old ? (lane.steps - old.steps) / seconds : 0,
    compute: old ? since("compute_s") : 0,
    attention: old ? since("exposed_attention_s") : 0,
    transfer: old ? since("exposed_transfer_s") : 0,
  };
}

function rowsPerSecond(status, last, now) {
  if (!last) return null;
  const rows = (found) => found.processes.reduce((sum, each) => sum + (each.counters?.rows ?? 0), 0);
  return Math.max(0, (rows(status) - rows(last.status)) / ((now - last.at) / 1000));
}

function bottleneck(lanes, status) {
  const sum = (name) => lanes.reduce((total, lane) => total + lane[name], 0);
  const parts = { compute: sum("compute"), attention: sum("attention"), transfer: sum("transfer") };
  const total = parts.compute + parts.attention + parts.transfer;
  if (!status.ready) return "Not all workers are there yet.";
  if (total < 0.02) return "Nothing to do.";
  const share = (name) => `${Math.round((100 * parts[name]) / total)} %`;
  const full = Object.values(status.groups).some((group) => group.free === 0 && group.cached === 0);
  if (status.requests.waiting && full) return "KV blocks are short: requests wait for memory of attention workers.";
  if (parts.transfer > parts.compute) return `Links hold it back: transfer is exposed ${share("transfer")} of the time.`;
  if (parts.attention > parts.compute) return `Attention holds it back: it is exposed ${share("attention")} of the time.`;
  return `Compute works ${share("compute")} of the time; exposed are attention ${share("attention")}, transfer ${share("transfer")}.`;
}

function draw(status, lanes) {
  const picture = document.getElementById("picture");
  picture.replaceChildren();
  const computes = status.processes.filter((each) => each.role === "compute");
  const attentions = status.processes.filter((each) => each.role === "attention");
  const left = layOut(computes, (worker) => 1 + lanes.filter((lane) => lane.worker === worker.name).length);
  const right = layOut(attentions, () => 2);
  const height = Math.max(left.height, right.height) + 10;
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  for (const from of left.boxes) for (const to of right.boxes) drawLink(picture, from, to);
  left.boxes.forEach((box) => drawCompute(picture, box, lanes));
  right.boxes.forEach((box) => drawAttention(picture, box));
}

function layOut(workers, rowsOf) {
  let y = 10;
  const boxes = workers.map((worker) => {
    const box = { worker, y, height: rowsOf(worker) * ROW + 8 };
    y += box.height + 10;
    return box;
  });
  return { boxes, height: y };
}

function drawLink(picture, from, to) {
  const [y1, y2] = [from.y + from.height / 2, to.y + to.height / 2];
  const [x1, x2] = [LEFT.x + LEFT.width, RIGHT.x];
  add(picture, "path", { class: "link", d: `M${x1} ${y1} C${x1 + 50} ${y1} ${x2 - 50} ${y2} ${x2} ${y2}` });
  label(picture, (x1 + x2) / 2, (y1 + y2) / 2 - 3, from.worker.link || "", "faint", "middle");
}

function drawCompute(picture, box, lanes) {
  const { worker, y } = box;
  add(picture, "rect", { class: "box", ...LEFT, y, height: box.height, rx: 4 });
  const stage = worker.stage ? `, stage ${worker.stage.number + 1} of ${worker.stage.count}` : "";
  label(picture, LEFT.x + 8, y + 17, `${worker.name}${stage}`);
  label(picture, LEFT.x + LEFT.width - 8, y + 17, `${worker.device}, ${worker.dtype}`, "faint", "end");
  lanes.filter((lane) => lane.worker === worker.name).forEach((lane, number) => {
    const top = y + ROW * (number + 1);
    label(picture, LEFT.x + 8, top + 13, `lane ${lane.lane}`, "faint");
    bar(picture, LEFT.x + 60, top + 3, 110, [["compute", lane.compute], ["attention", lane.attention], ["transfer", lane.transfer]]);
    label(picture, LEFT.x + LEFT.width - 8, top + 13, `${lane.steps.toFixed(lane.steps < 10 ? 1 : 0)} steps/s`, "faint", "end");
  });
}

function drawAttention(picture, box) {
  const { worker, y } = box;
  add(picture, "rect", { class: "box", ...RIGHT, y, height: box.height, rx: 4 });
  label(picture, RIGHT.x + 8, y + 17, worker.name);
  const heads = (worker.heads ?? []).map(([start, stop]) => `${start}–${stop - 1}`).join(", ");
  const group = worker.group === null ? "in no group" : `group ${worker.group}, heads ${heads}`;
  label(picture, RIGHT.x + RIGHT.width - 8, y + 17, group, "faint", "end");
  const blocks = worker.blocks;
  if (!blocks) return;
  bar(picture, RIGHT.x + 8, y + ROW + 3, 120, [["used", blocks.used / blocks.total], ["cached", blocks.cached / blocks.total]]);
  label(picture, RIGHT.x + RIGHT.width - 8, y + ROW + 13, `${blocks.used + blocks.cached} of ${blocks.total} blocks`, "faint", "end");
}

function bar(picture, x, y, width, shares) {
  add(picture, "rect", { class: "idle", x, y, width, height: 12 });
  const total = shares.reduce((sum, [, share]) => sum + share, 0);
  let at = x;
  for (const [kind, share] of shares) {
    const length = (width * share) / Math.max(1, total);
    add(picture, "rect", { class: kind, x: at, y, width: length, height: 12 });
    at += length;
  }
}

function label(picture, x, y, content, kind = "", anchor = "start") {
  add(picture, "text", { x, y, class: kind, "text-anchor": anchor }).textContent = content;
}

function add(picture, name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return picture.appendChild(made);
}

function setState(word, kind) {
  const badge = document.getElementById("state");
  badge.textContent = word;
  badge.className = `badge ${kind}`;
}

function text(id, content) {
  document.getElementById(id).textContent = content;
}

look();
