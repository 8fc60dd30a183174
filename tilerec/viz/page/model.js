// Data of the page: the numbers of the report, and values derived from them.
// Times are whole picoseconds, memory is whole bytes. Arrays over ranks and stages are flat: [rank * stages + stage].

const data = JSON.parse(document.getElementById("data").textContent);
const R = data.ranks, S = data.stages.length, M = data.tiers.length, T = data.names.length;

const time = (ps) => {
  for (const [size, unit] of [[1e12, "s"], [1e9, "ms"], [1e6, "µs"], [1e3, "ns"]])
    if (ps >= size) return `${figure(ps / size)} ${unit}`;
  return ps ? `${Math.round(ps)} ps` : "0";
};
const bytes = (count) => {
  let unit = 0;
  while (count >= 1024 && unit < 5) { count /= 1024; unit += 1; }
  return `${unit ? figure(count) : Math.round(count)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
};
const figure = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
const whole = (n) => Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, ",");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

const hostOf = new Int32Array(R), localOf = new Int32Array(R);
const hosts = data.hosts.map(runs);
hosts.forEach((ranks, h) => ranks.forEach((r, i) => { hostOf[r] = h; localOf[r] = i; }));

const loadOf = new Float64Array(R);
for (let r = 0; r < R; r++) for (let s = 0; s < S; s++) loadOf[r] += data.load[r * S + s];
const sum = (values) => values.reduce((a, b) => a + b, 0);
const largest = (values) => values.reduce((best, v, i) => (v > values[best] ? i : best), 0);
// Ranks are balanced if the largest time is at most (1 + data.balanced) times the mean.
const isBalanced = (most, mean) => most <= (1 + data.balanced) * mean;
const stageOf = data.stages.map((_, s) => {
  const column = Float64Array.from({ length: R }, (_, r) => data.load[r * S + s]);
  const rank = largest(column);
  return { rank, most: column[rank], mean: sum(column) / R };
});
const tiersUsed = data.tiers.map((_, m) => m).filter((m) => m === data.tier || data.memory.some((b, i) => i % M === m && b > 0));
const memoryOf = (r, m) => data.memory[r * M + m];
const capOf = (r, m) => data.cap[r * M + m];

// Parse ranks: "0-2,5" -> [0, 1, 2, 5]. Owners of row ranges, replicas in braces: "0-1,{2,6}" -> [[0], [1], [2, 6]].
function runs(text) {
  const found = [];
  for (const part of text.split(",")) {
    const [low, high = low] = part.split("-").map(Number);
    for (let r = low; r <= high; r++) found.push(r);
  }
  return found;
}
const ownersKept = new Map();
function owners(text) {
  let found = ownersKept.get(text);
  if (!found) {
    found = [];
    for (const [, many, run] of text.matchAll(/\{([^}]*)\},?|([^{}]+)/g)) {
      if (many !== undefined) found.push(runs(many));
      else for (const rank of runs(run.replace(/^,|,$/g, ""))) found.push([rank]);
    }
    if (ownersKept.size > 4096) ownersKept.clear();
    ownersKept.set(text, found);
  }
  return found;
}

// Column blocks of a table: columns [c0, c1), and by row range its owners (who), start(i) and end(i).
function blocksOf(t) {
  const rows = data.rows[t], dim = data.dims[t];
  return data.tilings[data.tiling[t]].map((block) => {
    const who = owners(block.ranks), [c0, c1] = block.columns || [0, dim];
    const chunk = Math.ceil(rows / who.length);
    const end = block.rows ? (i) => block.rows[i + 1] : (i) => Math.min(rows, (i + 1) * chunk);
    return { c0, c1, who, end, start: (i) => (i ? end(i - 1) : 0) };
  });
}
function tilesOf(t) {
  const found = [];
  for (const block of blocksOf(t))
    block.who.forEach((who, i) => found.push({ r0: block.start(i), r1: block.end(i), c0: block.c0, c1: block.c1, who }));
  return found;
}
// Cells of a table by rank. most: the largest number on one rank; all: the sum over all copies.
function heldBy(t) {
  const cells = new Map();
  let most = 0, all = 0;
  for (const block of blocksOf(t)) for (let i = 0; i < block.who.length; i++) {
    const size = (block.end(i) - block.start(i)) * (block.c1 - block.c0);
    for (const rank of block.who[i]) {
      const held = (cells.get(rank) || 0) + size;
      cells.set(rank, held);
      all += size;
      if (held > most) most = held;
    }
  }
  return { cells, most, all };
}
const ranksKept = new Map();
function ranksOf(t) {
  const key = data.tiling[t];
  if (!ranksKept.has(key)) {
    const texts = data.tilings[key].map((block) => block.ranks);
    ranksKept.set(key, /^\d+$/.test(texts.join("")) && texts.length === 1 ? new Set([Number(texts[0])]) : new Set(texts.flatMap((text) => owners(text).flat())));
  }
  return ranksKept.get(key);
}
const nameOf = (t) => (data.paths[data.path[t]] ? `${data.paths[data.path[t]]}.${data.names[t]}` : data.names[t]);
const shownName = (t) => (nameOf(t).trim() ? nameOf(t) : "(no name)");
// Compare tables by module, then by name: the order among equal sort keys.
function inOrder(a, b) {
  const x = data.paths[data.path[a]], y = data.paths[data.path[b]];
  if (x !== y) return x < y ? -1 : 1;
  return data.names[a] < data.names[b] ? -1 : data.names[a] > data.names[b] ? 1 : a - b;
}
const kindOf = (t) => data.words[data.kind[t]];
const typeOf = (t) => data.words[data.type[t]];
const optionOf = (t) => data.words[data.option[t]];
const ownPs = Float64Array.from({ length: T }, (_, t) => sum(data.own[t]));
const homePs = Float64Array.from({ length: T }, (_, t) => sum(data.home[t]));
const homeOf = data.stages.map((_, s) => sum(data.home.map((one) => one[s] || 0)));
const addsOf = (t) => ownPs[t] + homePs[t];

// Picoseconds (ps; by stage: by) and bytes of each table on a rank, in proportion to the rank's cells.
function onRank(rank) {
  const found = [];
  for (let t = 0; t < T; t++) {
    if (!ranksOf(t).has(rank)) continue;
    const { cells, most, all } = heldBy(t), held = cells.get(rank);
    found.push({ t, ps: Math.floor((ownPs[t] * held) / most), by: data.stages.map((_, s) => ((data.own[t][s] || 0) * held) / most), bytes: (data.bytes[t] * held) / all });
  }
  return found;
}
