// The list of tables, to sort and search, and the card of one table with its tiles.

let tableList;
function makeTables() {
  const columns = [
    { name: "", class: "picture" },
    { name: "table", by: (t) => nameOf(t) },
    { name: "rows × dim", class: "n shape", by: (t) => data.rows[t] * data.dims[t], down: true },
    { name: "memory", class: "n bytes", by: (t) => data.bytes[t], down: true },
    { name: "cut", class: "kind", by: (t) => kindOf(t) },
    { name: "ranks", class: "n where", by: (t) => ranksOf(t).size, down: true },
    { name: "adds", class: "n", by: addsOf, down: true },
  ];
  tableList = new List(at("tables"), columns, Array.from({ length: T }, (_, t) => t), {
    label: "Tables", start: columns[6], visible: 14, pick: pickTable, many: true,
    none: T ? "No matches." : "There are no tables.",
    cells: (t) => {
      const picture = element("canvas", { "aria-hidden": "true" });
      picture.draw = () => {
        const { pen, width, height } = canvas(picture);
        drawTiles(pen, t, 0, 0, width, height);
      };
      const ranks = ranksOf(t), where = ranks.size === 1 ? `rank ${[...ranks][0]}` : `${ranks.size === R ? "all " : ""}${whole(ranks.size)} ranks`;
      const path = data.paths[data.path[t]];
      return [
        picture,
        element("span", {}, element("div", { class: "cut name", title: nameOf(t) }, data.names[t].trim() ? data.names[t] : "(no name)"),
          element("div", { class: "cut sub" }, element("span", { class: "small" }, `${kindOf(t)}, ${whole(data.rows[t])} × ${data.dims[t]}, ${where} · `), path ? `${path} · ` : "", typeOf(t))),
        element("span", { class: "n shape" }, `${whole(data.rows[t])} × ${data.dims[t]}`),
        element("span", { class: "n bytes" }, bytes(data.bytes[t])),
        element("span", { class: "cut kind", title: `${kindOf(t)}: ${optionOf(t)}` }, kindOf(t)),
        element("span", { class: "n where" }, where),
        element("span", { class: "n" }, data.own[t].length ? time(addsOf(t)) : "?"),
      ];
    },
  });
}

let texts;
function matches(words) {
  texts ||= Array.from({ length: T }, (_, t) => `${nameOf(t)} ${kindOf(t)} ${typeOf(t)} ${optionOf(t)}`.toLowerCase());
  const tests = words.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    // Half-typed "rank:" and "cut:" match all tables.
    if (word === "rank:" || word === "cut:") return () => true;
    const rank = /^rank:(\d+)$/.exec(word);
    if (rank) return (t) => ranksOf(t).has(Number(rank[1]));
    return word.startsWith("cut:") ? (t) => kindOf(t) === word.slice(4) : (t) => texts[t].includes(word);
  });
  return Array.from({ length: T }, (_, t) => t).filter((t) => tests.every((test) => test(t)));
}
function search() {
  const found = matches(at("search").value);
  tableList.set(found);
  at("found").textContent = found.length === T ? `${whole(T)} tables` : `${whole(found.length)} of ${whole(T)} tables`;
}
function searchFor(words) {
  at("search").value = words;
  search();
  at("h-tables").scrollIntoView();
}

function pickTable(t, byHand) {
  chosenTable = t;
  if (!tableList.items.includes(t)) { at("search").value = ""; search(); }
  tableList.choose(t);
  drawTable();
  if (byHand && matchMedia("(max-width: 900px)").matches) at("table").scrollIntoView({ block: "nearest" });
}
// The reason for a table's cut, and a folded list of all ways to cut it with their step times.
function whyOf(t) {
  const why = data.why[t];
  if (!why) return [element("h4", {}, "Why this cut"), element("p", { id: "why-not" }, data.why_not + (data.why_not.endsWith(".") ? "" : ` ${nameOf(t)}`))];
  const [reason, notes, ways] = why;
  const heads = ["way", "step then", "verdict", "pieces", "bytes each", "adds on owners", "on all ranks"];
  return [
    element("h4", {}, "Why this cut"),
    element("p", { id: "why-so" }, reason),
    ...notes.map((note) => element("p", { class: "muted" }, note)),
    element("details", { id: "why" }, element("summary", {}, ways.length > 1 ? `The ${whole(ways.length)} ways that were considered` : "The one way there is"),
      element("div", { class: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, ...heads.map((name, i) => element("th", { class: i === 1 || i > 3 ? "n" : null }, name)))),
        element("tbody", {}, ...ways.map(([way, pieces, width, size, own, home, then, verdict]) => element("tr", {},
          element("td", {}, data.words[way]), element("td", { class: "n" }, time(then)), element("td", {}, data.words[verdict]),
          element("td", {}, width > 1 ? `${pieces} × ${width}` : `${pieces}`), ...[bytes(size), time(own), time(home)].map((text) => element("td", { class: "n" }, text)))))))),
  ];
}
// The share of a table's ids that its most frequent ones have, over a logarithmic axis. Rows that every rank holds are
// shaded. If ids are numbered by frequency, the axis is that of the rows, and shows the cuts of the tiling, too.
function curveOf(t) {
  const [, , , points = [], ordered, hot] = data.why[t] ?? [];
  if (!points.length) return [];
  const rows = data.rows[t], place = (row) => Math.log(1 + row) / Math.log(1 + rows);
  const head = hot ? [{ r0: 0, r1: hot, who: [0, 1] }] : [];
  const tiles = [...head, ...(ordered ? tilesOf(t) : [])], shareAt = (row) => points.findLast(([r]) => r <= row)?.[1] ?? 0;
  const picture = element("canvas", { id: "curve", role: "img", "aria-label": `Share of the ids of ${nameOf(t)} ${ordered ? "in its first rows" : "that its most frequent ones have"}` });
  picture.draw = () => {
    const { pen, width, height } = canvas(picture), low = height - 16;
    for (const { r0, r1, who } of tiles) {
      pen.fillStyle = track;
      if (who.length > 1) pen.fillRect(width * place(r0), 0, width * (place(r1) - place(r0)), low);
      pen.fillStyle = line;
      if (r1 < rows) pen.fillRect(width * place(r1), 0, 1, low);
    }
    pen.strokeStyle = palette[0];
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(0, low);
    for (const [row, share] of points) pen.lineTo(width * place(row), low - (low - 2) * share);
    pen.stroke();
    pen.fillStyle = ink;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "bottom";
    for (let row = 1; row <= rows; row *= 100) {
      pen.textAlign = width * place(row) > width - 40 ? "right" : "center";
      pen.fillText(whole(row), width * place(row), height);
    }
  };
  tip(picture, (x) => {
    const row = Math.round((1 + rows) ** (x / picture.clientWidth) - 1);
    return `${ordered ? `first ${whole(row)} rows` : `${whole(row)} most frequent ids`}: ${(100 * shareAt(row)).toFixed(0)} % of the ids`;
  });
  const first = hot ? `, ${whole(hot)} hot rows shaded` : "";
  const title = ordered ? `in its first rows, with the cuts of the plan${first}` : `that its most frequent ones have${first}`;
  return [element("h4", { id: "curve-title" }, `Reads: share of its ids ${title}`), picture];
}
function drawTable() {
  const t = chosenTable;
  at("table").hidden = t == null;
  if (t == null) return;
  const tiles = tilesOf(t), ranks = ranksOf(t), copies = tiles.map((tile) => tile.who.length), most = copies.reduce((a, b) => Math.max(a, b));
  const held = heldBy(t), fullest = [...held.cells].reduce((a, b) => (b[1] > a[1] ? b : a));
  const facts = [
    ["rows × dim", `${whole(data.rows[t])} × ${data.dims[t]}, ${typeOf(t)}`],
    ["memory", `${bytes(data.bytes[t])} in all, ${bytes((data.bytes[t] * fullest[1]) / held.all)} at most on a rank`],
    ["cut", optionOf(t) && optionOf(t) !== kindOf(t) ? `${kindOf(t)} (${optionOf(t)})` : kindOf(t)],
    ["tiles", `${whole(tiles.length)}${most > 1 ? `, ${copies.every((c) => c === most) ? `${whole(most)} copies of each` : `up to ${whole(most)} copies`}` : ""}`],
    ["ranks", setOf(ranks)],
    ...(data.about[t] ? [["runs as", data.about[t]]] : []),
  ];
  const picture = element("canvas", { id: "tiles", role: "img", "aria-label": `${nameOf(t)} as its tiles` });
  const drawn = () => {
    const { pen, width, height } = canvas(picture);
    drawTiles(pen, t, 0, 0, width, height, { labels: true });
  };
  const reads = curveOf(t);
  const stages = data.stages.map((name, s) => [name, data.own[t][s] || 0, data.home[t][s] || 0, s]).filter(([, own, home]) => own || home);
  const top = Math.max(1, ...stages.map(([, own, home]) => own + home));
  at("table").replaceChildren(
    element("h3", { id: "table-name" }, shownName(t)),
    element("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
    ...whyOf(t),
    ...reads,
    element("h4", {}, "Tiles: columns across, rows down, coloured by rank"),
    picture,
    element("p", { class: "muted" }, `columns 0 to ${data.dims[t]}, rows 0 to ${whole(data.rows[t])}`),
    ...(stages.length ? [
      element("h4", {}, "Time that it adds: on the rank that holds most of it, and (pale) on every rank"),
      element("ul", { class: "weigh" }, ...stages.map(([name, own, home, s]) => {
        const one = bar([[own / top, stageColour(s), hatched[s]], [home / top, stageColour(s), hatched[s]]]);
        if (home && one.lastChild) one.lastChild.style.opacity = "0.45";
        return element("li", {}, element("span", {}, stageKey(s), name), one, element("span", { class: "n" }, time(own + home)));
      }))] : [element("p", { class: "muted" }, "The time that it adds is not known.")]),
    element("details", {}, element("summary", {}, `Rows, columns and ranks of the ${tiles.length > 1 ? `${whole(tiles.length)} tiles` : "tile"}`),
      element("div", { class: "scroll" }, element("table", { id: "tile-list" }, element("thead", {}, element("tr", {}, ...["rows", "columns", "ranks"].map((h) => element("th", {}, h)))),
        element("tbody", {}, ...tiles.slice(0, 200).map((tile) => element("tr", {}, element("td", {}, `[${whole(tile.r0)}, ${whole(tile.r1)})`), element("td", {}, `[${tile.c0}, ${tile.c1})`), element("td", {}, setOf(tile.who))))))),
      tiles.length > 200 ? element("p", { class: "muted" }, `and ${whole(tiles.length - 200)} more`) : null),
  );
  drawn();
  picture.draw = drawn;
  reads[1]?.draw();
  tip(picture, (x, y) => {
    const row = (y / picture.clientHeight) * data.rows[t], column = (x / picture.clientWidth) * data.dims[t];
    const tile = tiles.find((one) => row >= one.r0 && row < one.r1 && column >= one.c0 && column < one.c1);
    return tile && `rows [${whole(tile.r0)}, ${whole(tile.r1)})\ncolumns [${tile.c0}, ${tile.c1})\nrank${tile.who.length > 1 ? "s" : ""} ${setOf(tile.who)}`;
  });
}
