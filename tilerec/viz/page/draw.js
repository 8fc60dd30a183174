// Colours, DOM elements and canvases.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ink, track, line, over, rest, memoryColour, palette, dark;
function readTheme() {
  [ink, track, line, over, rest, memoryColour] = ["--ink", "--track", "--line", "--over", "--rest", "--memory"].map(css);
  palette = Array.from({ length: 8 }, (_, i) => css(`--c${i}`));
  dark = matchMedia("(prefers-color-scheme: dark)").matches;
  hatch = makeHatch();
}
// A stage between hosts is hatched and reuses the colour of a stage inside hosts.
const hatched = data.stages.map((name) => name.endsWith(" between hosts"));
const colourOf = data.stages.map((_, s) => hatched.slice(0, s).filter((one) => one === hatched[s]).length % 8);
const stageColour = (s) => palette[colourOf[s]];
let hatch;
function stagePaint(pen, s, x, y, wide, tall) {
  pen.fillStyle = stageColour(s);
  pen.fillRect(x, y, wide, tall);
  if (!hatched[s]) return;
  pen.fillStyle = hatch;
  pen.fillRect(x, y, wide, tall);
}
function makeHatch() {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.strokeStyle = css("--hatch");
  pen.lineWidth = 2;
  for (const shift of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); pen.stroke(); }
  return pen.createPattern(tile, "repeat");
}

// Up to eight ranks: one colour each. More ranks: one of eight colours per host, in tints per rank. More ranks on a
// single host: eight colours that repeat. Labels, tooltips and lists name the ranks.
function rankColour(rank) {
  if (R <= 8) return palette[rank];
  if (hosts.length === 1) return palette[rank % 8];
  const size = hosts[hostOf[rank]].length;
  return tinted(palette[hostOf[rank] % 8], size > 1 ? (0.6 * localOf[rank]) / (size - 1) : 0);
}
// Return a colour "#rrggbb" mixed with white, or with black on a dark page. share: of white or black, 0 to 1.
const tinted = (colour, share) =>
  `rgb(${[1, 3, 5].map((i) => Math.round(parseInt(colour.slice(i, i + 2), 16) * (1 - share) + (dark ? 0 : 255 * share))).join(" ")})`;
// Return black or white for text on a colour, by the colour's luma.
const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const inkKept = new Map();
function inkOn(colour) {
  if (!inkKept.has(colour)) {
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
    inkKept.set(colour, 0.299 * r + 0.587 * g + 0.114 * b > 118 ? "#111" : "#fff");
  }
  return inkKept.get(colour);
}
function rampColour(share) {
  const at = Math.max(0, Math.min(1, share));
  return dark ? `hsl(212 ${30 + 45 * at}% ${18 + 50 * at}%)` : `hsl(212 ${40 + 30 * at}% ${92 - 62 * at}%)`;
}

// element("li", {class: "x"}, "text", child): strings become text nodes, never HTML.
function element(tag, about = {}, ...inside) {
  const found = document.createElement(tag);
  for (const [key, value] of Object.entries(about)) {
    if (key === "style") for (const [name, v] of Object.entries(value)) found.style.setProperty(name, v);
    else if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (value === true) found.setAttribute(key, "");
    else if (value !== false && value != null) found.setAttribute(key, value);
  }
  found.append(...inside.filter((part) => part != null));
  return found;
}
const key = (colour, stripes) => element("span", { class: stripes ? "key hatch" : "key", style: { "background-color": colour } });
const stageKey = (s) => key(stageColour(s), hatched[s]);
const at = (id) => document.getElementById(id);

// A bar of segments [share of the width, colour, hatched, text] and a mark at a share of the width.
function bar(segments, { mark, label } = {}) {
  const found = element("div", { class: "bar", role: "img", "aria-label": label });
  for (const [share, colour, stripes, text] of segments)
    if (share > 0) found.append(element("i", { class: stripes ? "hatch" : null, style: { width: `${(100 * share).toFixed(3)}%`, "background-color": colour } }, text ? element("span", { class: "tag" }, text) : null));
  if (mark != null) found.append(element("b", { style: { left: `calc(${(100 * Math.min(1, mark)).toFixed(3)}% - 1px)` } }));
  return found;
}

// Size a canvas for the screen's resolution and return a pen in CSS pixels.
function canvas(node, height) {
  const width = Math.max(1, node.clientWidth), tall = height || node.clientHeight || 1;
  const scale = Math.min(3, window.devicePixelRatio || 1);
  if (height) node.style.height = `${height}px`;
  node.width = Math.round(width * scale);
  node.height = Math.round(tall * scale);
  const pen = node.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return { pen, width, height: tall };
}

// Draw a table's tiles into a box. A tile with several owners has diagonal stripes in their colours.
function drawTiles(pen, t, x, y, width, height, { labels = false } = {}) {
  const rows = data.rows[t], dim = data.dims[t];
  for (const block of blocksOf(t)) {
    const x0 = x + (width * block.c0) / dim, x1 = x + (width * block.c1) / dim;
    const many = block.who.length;
    if (many > height) {
      // More row ranges than pixels: each pixel line has the colour of the row range at its position.
      for (let p = 0; p < height; p++) {
        pen.fillStyle = rankColour(block.who[Math.floor((p / height) * many)][0]);
        pen.fillRect(x0, y + p, x1 - x0, 1);
      }
      continue;
    }
    for (let i = 0; i < many; i++) {
      const y0 = y + (height * block.start(i)) / rows, y1 = y + (height * block.end(i)) / rows;
      const who = block.who[i], gap = labels && x1 - x0 > 6 && y1 - y0 > 6 ? 1 : (many > 1 || block.c1 - block.c0 < dim) && y1 - y0 > 3 && x1 - x0 > 3 ? 0.5 : 0;
      fillTile(pen, who, x0 + gap / 2, y0 + gap / 2, x1 - x0 - gap, y1 - y0 - gap);
      if (!labels || y1 - y0 < 13) continue;
      pen.font = "12px system-ui, sans-serif";
      let text = who.length > 1 ? `${who.length} copies` : `rank ${who[0]}`, room = pen.measureText(text).width + 8;
      if (room > x1 - x0) { text = String(who.length > 1 ? who.length : who[0]); room = pen.measureText(text).width + 4; }
      if (room > x1 - x0) continue;
      const middle = [(x0 + x1) / 2, (y0 + y1) / 2];
      if (who.length > 1) { pen.fillStyle = dark ? "#161715" : "#fff"; pen.fillRect(middle[0] - room / 2, middle[1] - 8, room, 16); }
      pen.fillStyle = who.length > 1 ? ink : inkOn(rankColour(who[0]));
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(text, middle[0], middle[1]);
    }
  }
}
function fillTile(pen, who, x, y, width, height) {
  pen.fillStyle = rankColour(who[0]);
  pen.fillRect(x, y, width, height);
  if (who.length < 2) return;
  const stripes = Math.max(2, Math.min(who.length, Math.floor((width + height) / 7), 64)), step = (width + height) / stripes;
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  for (let i = 0; i < stripes; i++) {
    pen.fillStyle = rankColour(who[Math.floor((i * who.length) / stripes)]);
    pen.beginPath();
    pen.moveTo(x + i * step, y);
    pen.lineTo(x + (i + 1) * step, y);
    pen.lineTo(x + (i + 1) * step - height, y + height);
    pen.lineTo(x + i * step - height, y + height);
    pen.fill();
  }
  pen.restore();
}

function tip(node, textAt) {
  const box = at("tip");
  const hide = () => { box.hidden = true; };
  node.addEventListener("pointermove", (event) => {
    const frame = node.getBoundingClientRect();
    const text = textAt(event.clientX - frame.left, event.clientY - frame.top);
    if (!text) return hide();
    box.textContent = text;
    box.hidden = false;
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 6))}px`;
    box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 6)}px`;
  });
  node.addEventListener("pointerleave", hide);
}
const setOf = (ranks) => {
  const list = [...ranks].sort((a, b) => a - b), parts = [];
  for (let i = 0; i < list.length; ) {
    let j = i;
    while (j + 1 < list.length && list[j + 1] === list[j] + 1) j++;
    parts.push(i === j ? `${list[i]}` : `${list[i]}–${list[j]}`);
    i = j + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")} … (${list.length} ranks)` : parts.join(", ");
};
