// Hosts with their ranks as squares, and the table of topology fields.

let places = [];
const ways = [
  ["time", (r) => loadOf[r], (v) => time(v)],
  ...data.stages.map((name, s) => [`time: ${name}`, (r) => data.load[r * S + s], (v) => time(v)]),
  ...tiersUsed.map((m) => [tierName(m), (r) => memoryOf(r, m), (v) => bytes(v)]),
  ["rank (colours of the tiles)", null, null],
];
function makeMachines() {
  at("by").append(...ways.map(([name], i) => element("option", { value: i }, name)));
  at("by").addEventListener("change", drawHosts);
  at("topology").tBodies[0].append(...data.topology.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value))));
  const node = at("hosts");
  const under = (x, y) => places.find((p) => x >= p.x && x < p.x + p.size && y >= p.y && y < p.y + p.size);
  node.addEventListener("click", (event) => { const found = under(event.offsetX, event.offsetY); if (found) pickRank(found.rank, true); });
  tip(node, (x, y) => { const found = under(x, y); return found && rankTip(found.rank); });
}
function drawHosts() {
  const node = at("hosts"), [, value, text] = ways[Number(at("by").value) || 0], width = node.clientWidth || 1;
  const size = R > 2048 ? 7 : R > 256 ? 11 : R > 64 ? 18 : 30, pad = size > 12 ? 6 : 4;
  // Hosts are boxes side by side, at most 8 ranks wide.
  places = [];
  const shapes = hosts.map((ranks) => ({ ranks, across: Math.min(ranks.length, 8, Math.max(1, Math.floor((width - 2 * pad) / (size + 1)))) }));
  let x = 0, y = 0, tall = 0;
  const boxes = [];
  for (const { ranks, across } of shapes) {
    const wide = across * (size + 1) + 2 * pad, high = Math.ceil(ranks.length / across) * (size + 1) + 2 * pad;
    if (x && x + wide > width) { x = 0; y += tall + pad; tall = 0; }
    boxes.push([x, y, wide, high]);
    ranks.forEach((rank, i) => places.push({ rank, size, x: x + pad + (i % across) * (size + 1), y: y + pad + Math.floor(i / across) * (size + 1) }));
    x += wide + pad;
    tall = Math.max(tall, high);
  }
  const { pen } = canvas(node, Math.max(1, y + tall));
  let least = Infinity, most = 0;
  if (value) for (let r = 0; r < R; r++) { least = Math.min(least, value(r)); most = Math.max(most, value(r)); }
  pen.strokeStyle = line;
  for (const [bx, by, bw, bh] of boxes) pen.strokeRect(bx + 0.5, by + 0.5, bw - 1, bh - 1);
  pen.font = `${Math.min(12, size * 0.45)}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const place of places) {
    const colour = value ? rampColour(most > 0 ? value(place.rank) / most : 0) : rankColour(place.rank);
    pen.fillStyle = colour;
    pen.fillRect(place.x, place.y, size, size);
    if (place.rank === chosenRank) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(place.x + 1, place.y + 1, size - 2, size - 2); pen.lineWidth = 1; }
    if (size >= 18) { pen.fillStyle = inkOn(colour); pen.fillText(String(place.rank), place.x + size / 2, place.y + size / 2); }
  }
  at("hosts-scale").textContent = value ? `From ${text(least)} (rank ${extreme(value, -1)}) to ${text(most)} (rank ${extreme(value, 1)}); ${dark ? "brighter" : "darker"} is more.` : "Each box is a host.";
}
function extreme(value, way) {
  let best = 0;
  for (let r = 1; r < R; r++) if (way * value(r) > way * value(best)) best = r;
  return best;
}
