// The step by stage, the list of ranks, and the card of one rank: its load, and the tables that cause it.

function drawStep() {
  const parts = data.stages.map((name, s) => [name, stageOf[s].most, stageColour(s), hatched[s]]);
  if (data.charge) parts.push(["collectives as such", data.charge, rest, false]);
  const whole = sum(parts.map((p) => p[1])) || 1;
  const bound = data.bound / whole;
  const drawn = bar(parts.map(([name, ps, colour, stripes]) => [ps / whole, colour, stripes, fitting(name, (ps / whole) * at("step-bar").clientWidth)]), { mark: data.bound ? bound : null });
  at("step-bar").replaceChildren(...drawn.childNodes);
  at("step-bar").setAttribute("aria-label", parts.map(([name, ps]) => `${name} ${time(ps)}`).join(", "));
  const axis = at("step-axis");
  axis.replaceChildren();
  if (data.bound) {
    const label = element("span", {}, `no plan is below ${time(data.bound)}`);
    if (bound > 0.5) label.style.right = `${(100 * (1 - Math.min(1, bound))).toFixed(2)}%`;
    else label.style.left = `${(100 * bound).toFixed(2)}%`;
    axis.append(label);
  }
  const body = at("stages").tBodies[0];
  body.replaceChildren();
  parts.forEach(([name, ps, colour, stripes], s) => {
    const one = stageOf[s];
    const cells = [percent(ps / whole), time(ps), ...(one
      ? [slowestOf(one), time(one.mean), one.mean ? figure(one.most / one.mean) : "–"]
      : ["all ranks", time(ps), "–"])];
    body.append(element("tr", {}, element("td", {}, key(colour, stripes), name), ...cells.map((cell, i) => element("td", { class: i > 2 ? "n spare" : "n" }, cell))));
  });
}
// Return a name if it fits the width in pixels, else null.
const fitting = (text, width) => (width > 7.5 * text.length + 8 ? text : null);
const slowestOf = (one) => (!one.most ? "–" : R > 1 && isBalanced(one.most, one.mean) ? "balanced" : rankLink(one.rank));
const rankLink = (rank) => element("button", { type: "button", class: "link", onclick: (event) => { event.stopPropagation(); pickRank(rank, true); } }, `rank ${rank}`);

let rankList, chosenRank, chosenTable;
const slowestLoad = loadOf.reduce((a, b) => Math.max(a, b), 0) || 1;
function timeBar(rank) {
  const parts = data.stages.map((_, s) => [data.load[rank * S + s] / slowestLoad, stageColour(s), hatched[s]]);
  const found = bar(parts, { label: `time ${time(loadOf[rank])}` });
  found.classList.add("time");
  return found;
}
function memoryBar(rank, m) {
  const cap = capOf(rank, m), held = memoryOf(rank, m), most = Math.max(cap, held) || 1;
  const found = bar([[held / most, held > cap ? over : memoryColour]], { mark: held > cap ? cap / most : null, label: `memory ${bytes(held)} of ${bytes(cap)}` });
  found.classList.add("memory");
  return found;
}
const tierName = (m) => `${data.tiers[m]} memory`;

function makeRanks() {
  const columns = [
    { name: "rank", by: (r) => r },
    { name: "host", class: "host", by: (r) => hostOf[r] },
    { name: "time", by: (r) => loadOf[r], down: true },
    ...[data.tier].map((m) => ({ name: tierName(m), by: (r) => memoryOf(r, m), down: true })),
  ];
  rankList = new List(at("ranks"), columns, Array.from({ length: R }, (_, r) => r), {
    label: "Ranks", start: R > 24 ? columns[2] : columns[0], visible: 16, pick: pickRank,
    cells: (r) => [
      element("span", { class: "n" }, String(r)),
      element("span", { class: "n host sub" }, String(hostOf[r])),
      element("span", { class: "pair" }, timeBar(r), element("span", { class: "n" }, time(loadOf[r]))),
      element("span", { class: "pair" }, memoryBar(r, data.tier), element("span", { class: "n" }, bytes(memoryOf(r, data.tier)))),
    ],
  });
  at("overview").hidden = R <= 24;
}
function drawLegend() {
  at("legend").replaceChildren(...data.stages.map((name, s) => element("li", {}, stageKey(s), name)), element("li", {}, key(memoryColour), tierName(data.tier)));
}

// Overviews with one column per rank. With more ranks than pixels, a column shows the largest of its ranks.
function columnsOf(width) {
  const count = Math.min(R, Math.floor(width));
  return Array.from({ length: count }, (_, i) => [Math.floor((i * R) / count), Math.floor(((i + 1) * R) / count)]);
}
function highest(from, to, value) {
  let best = from;
  for (let r = from + 1; r < to; r++) if (value(r) > value(best)) best = r;
  return best;
}
const overviews = [
  ["over-time", (r) => loadOf[r], (pen, r, x, wide, height) => {
    let y = height;
    for (let s = 0; s < S; s++) {
      const tall = (height * data.load[r * S + s]) / slowestLoad;
      stagePaint(pen, s, x, y - tall, wide, tall);
      y -= tall;
    }
  }],
  ["over-memory", (r) => memoryOf(r, data.tier), (pen, r, x, wide, height) => {
    const held = memoryOf(r, data.tier), tall = (height * held) / memoryTop, cap = capOf(r, data.tier);
    pen.fillStyle = held > cap ? over : memoryColour;
    pen.fillRect(x, height - tall, wide, tall);
    pen.fillStyle = ink;
    pen.fillRect(x, height - (height * cap) / memoryTop, wide + 1, 1.5);
  }],
];
let memoryTop = 1;
for (let r = 0; r < R; r++) memoryTop = Math.max(memoryTop, 1.03 * capOf(r, data.tier), memoryOf(r, data.tier));
function drawOverviews() {
  if (R <= 24) return;
  for (const [id, value, paint] of overviews) {
    const { pen, width, height } = canvas(at(id), 110), all = columnsOf(width), gap = width / all.length > 4 ? 1 : 0;
    pen.fillStyle = track;
    pen.fillRect(0, 0, width, height);
    all.forEach(([from, to], i) => {
      const x = (i * width) / all.length, wide = width / all.length - gap;
      paint(pen, highest(from, to, value), x, Math.max(wide, 0.7), height);
      if (chosenRank >= from && chosenRank < to) {
        pen.strokeStyle = ink;
        pen.lineWidth = 1.5;
        pen.strokeRect(x - 1, 0.75, Math.max(wide, 2) + 2, height - 1.5);
      }
    });
  }
}
function wireOverviews() {
  for (const [id, value] of overviews) {
    const node = at(id);
    const under = (x) => {
      const all = columnsOf(node.clientWidth), [from, to] = all[Math.max(0, Math.min(all.length - 1, Math.floor((x / node.clientWidth) * all.length)))];
      return highest(from, to, value);
    };
    node.addEventListener("click", (event) => pickRank(under(event.offsetX), false));
    tip(node, (x) => rankTip(under(x)));
  }
}
function rankTip(r) {
  const memory = tiersUsed.map((m) => `${tierName(m)}: ${bytes(memoryOf(r, m))} of ${bytes(capOf(r, m))}`);
  return [`rank ${r}, host ${hostOf[r]}: ${time(loadOf[r])}`, ...data.stages.map((name, s) => `${name}: ${time(data.load[r * S + s])}`), ...memory].join("\n");
}

function pickRank(rank, byHand) {
  chosenRank = rank;
  rankList.choose(rank);
  drawRank();
  drawOverviews();
  drawHosts();
  if (byHand && matchMedia("(max-width: 900px)").matches) at("rank").scrollIntoView({ block: "nearest" });
}
function drawRank() {
  const rank = chosenRank, mean = sum(loadOf) / R, held = onRank(rank);
  const first = rank === largest(loadOf) && R > 1, balanced = R > 1 && isBalanced(loadOf[largest(loadOf)], mean);
  const about = `host ${hostOf[rank]}${first ? (balanced ? "; the most loaded rank, but the ranks are balanced" : "; the most loaded rank") : ""}`;
  const heaviest = [...held].sort((a, b) => b.ps - a.ps || inOrder(a.t, b.t)).slice(0, 10);
  const home = sum(homePs), here = sum(held.map((h) => h.ps));
  // A host's network card carries the pieces of all its ranks. The remaining time (fixed) is the same under every plan.
  const link = sum(data.stages.map((_, s) => (hatched[s] ? Math.max(0, data.load[rank * S + s] - sum(held.map((h) => h.by[s])) - homeOf[s]) : 0)));
  const fixed = Math.max(0, loadOf[rank] - here - home - link);
  const sentences = [`${time(loadOf[rank])} of work in all stages`, mean ? `, ${figure(loadOf[rank] / mean)} times the mean` : "", "."];
  if (here || home) sentences.push(` ${time(here)} for the pieces of ${whole(held.length)} table${held.length === 1 ? "" : "s"} on this rank, ${time(home)} for its own batch, as on every rank`,
    link > 0.005 * loadOf[rank] ? `, ${time(link)} of its network card for tables of the other ${hosts[hostOf[rank]].length - 1} ranks of its host` : "",
    fixed > 0.005 * loadOf[rank] ? `, ${time(fixed)} for no single table: bookkeeping, and collectives that no plan avoids.` : ".");
  if (heaviest.length && heaviest[0].ps) sentences.push(" ", element("bdi", {}, shownName(heaviest[0].t)), ` alone is ${percent(heaviest[0].ps / loadOf[rank])}.`);
  const most = heaviest.length ? heaviest[0].ps || 1 : 1;
  const fattest = [...held].sort((a, b) => b.bytes - a.bytes || inOrder(a.t, b.t)).slice(0, 5), fat = fattest.length ? fattest[0].bytes || 1 : 1;
  at("rank").replaceChildren(
    element("h3", { id: "rank-name" }, `Rank ${rank}`),
    element("p", { class: "muted", id: "rank-about" }, about),
    element("p", { id: "rank-load" }, ...sentences),
    element("h4", {}, "Stages (mark: mean of all ranks)"),
    element("ul", { class: "weigh" }, ...data.stages.map((name, s) => {
      const ps = data.load[rank * S + s], top = stageOf[s].most || 1;
      return element("li", {}, element("span", {}, stageKey(s), name, stageOf[s].rank === rank && ps && !isBalanced(stageOf[s].most, stageOf[s].mean) ? element("span", { class: "sub" }, " slowest") : null),
        bar([[ps / top, stageColour(s), hatched[s]]], { mark: stageOf[s].most ? stageOf[s].mean / top : null }), element("span", { class: "n" }, time(ps)));
    })),
    element("h4", {}, "Memory"),
    element("ul", { class: "weigh" }, ...tiersUsed.map((m) => element("li", {}, element("span", {}, tierName(m)), memoryBar(rank, m),
      element("span", { class: "n", title: `of ${bytes(capOf(rank, m))}` }, capOf(rank, m) ? percent(memoryOf(rank, m) / capOf(rank, m)) : bytes(memoryOf(rank, m)))))),
    ...(heaviest.length ? [element("h4", {}, "Tables that take the most time here"), element("ul", { class: "weigh", id: "heaviest" }, ...heaviest.map((h) => weighed(h.t, h.ps / most, time(h.ps)))),
      ...others(held.length - heaviest.length, time(here - sum(heaviest.map((h) => h.ps))), rank)] : []),
    ...(fattest.length ? [element("h4", {}, "Tables that take the most memory here"), element("ul", { class: "weigh", id: "fattest" }, ...fattest.map((h) => weighed(h.t, h.bytes / fat, bytes(h.bytes)))),
      ...others(held.length - fattest.length, bytes(sum(held.map((h) => h.bytes)) - sum(fattest.map((h) => h.bytes))), rank)] : []),
    ...(held.length ? [element("p", {}, allOf(rank, held.length > 1 ? `all ${whole(held.length)} tables of rank ${rank}` : `the one table of rank ${rank}`))] : []),
  );
}
const allOf = (rank, text) => element("button", { type: "button", class: "link", onclick: () => searchFor(`rank:${rank}`) }, text);
const others = (count, text, rank) => (count > 0
  ? [element("p", { class: "muted others" }, "and ", allOf(rank, `${whole(count)} other table${count > 1 ? "s" : ""} of rank ${rank}`), `, ${text} together`)]
  : []);
const weighed = (t, share, text) => element("li", {},
  element("button", { type: "button", class: "link", title: nameOf(t), onclick: () => pickTable(t, true) }, shownName(t)),
  bar([[share, rest]]), element("span", { class: "n" }, text));
