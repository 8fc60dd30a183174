// Virtual list of any length: rows have equal heights, and only visible rows are in the DOM. Column heads sort it.

class List {
  // columns: [{name, class, by(item) -> sort key, down: sort the largest first}]; cells(item) -> elements of a row;
  // pick(item): called when the user picks a row; visible: largest number of rows in view; none: text of an empty list.
  constructor(root, columns, items, { cells, pick, label, start, visible = 12, many = false, none = "No matches." }) {
    this.columns = columns;
    this.items = items;
    this.cells = cells;
    this.pick = pick;
    this.most = visible;
    this.none = none;
    this.chosen = null;
    this.lines = new Map();
    this.heads = columns.map((column) => {
      if (!column.by) return element("span", { class: column.class }, column.name || "");
      const button = element("button", { type: "button", onclick: () => this.sort(column) }, column.name);
      return element("span", { class: column.class, role: "columnheader" }, button);
    });
    this.space = element("div", { class: "space", role: "rowgroup" });
    this.view = element("div", { class: "view", tabindex: "-1" }, this.space);
    this.frame = element("div", { class: "list", role: "table", "aria-label": label },
      element("div", { class: many ? "head many" : "head", role: "row" }, ...this.heads), this.view);
    root.replaceChildren(this.frame);
    this.view.addEventListener("scroll", () => this.show());
    this.view.addEventListener("keydown", (event) => this.step(event));
    this.sort(start, true);
  }
  get height() {
    return parseFloat(getComputedStyle(this.frame).getPropertyValue("--row"));
  }
  sort(column, first = false) {
    if (!first && this.column === column) this.down = !this.down;
    else { this.column = column; this.down = Boolean(column.down); }
    this.columns.forEach((c, i) => {
      const button = this.heads[i].querySelector("button");
      if (!button) return;
      this.heads[i].setAttribute("aria-sort", c === column ? (this.down ? "descending" : "ascending") : "none");
      if (c === column) button.dataset.way = this.down ? "down" : "up";
      else delete button.dataset.way;
    });
    this.order();
  }
  order() {
    const { by } = this.column, way = this.down ? -1 : 1;
    const keys = new Map(this.items.map((item) => [item, by(item)]));
    this.items.sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      return x < y ? -way : x > y ? way : a - b;
    });
    this.view.scrollTop = 0;
    this.redraw();
  }
  set(items) {
    this.items = items;
    this.order();
  }
  redraw() {
    for (const node of this.lines.values()) node.remove();
    this.lines.clear();
    this.show();
  }
  show() {
    const row = this.height, count = this.items.length, room = Math.max(4, Math.floor((0.62 * innerHeight) / row));
    this.space.style.height = `${Math.max(1, count) * row}px`;
    this.view.style.height = `${Math.max(1, Math.min(count, this.most, room)) * row}px`;
    this.frame.setAttribute("aria-rowcount", count);
    if (!count) {
      this.space.replaceChildren(element("div", { class: "empty" }, this.none));
      return;
    }
    this.space.querySelector(".empty")?.remove();
    const first = Math.max(0, Math.floor(this.view.scrollTop / row) - 4);
    const last = Math.min(count, Math.ceil((this.view.scrollTop + this.view.clientHeight) / row) + 4);
    for (const [i, node] of this.lines)
      if (i < first || i >= last) { node.remove(); this.lines.delete(i); }
    for (let i = first; i < last; i++) {
      if (this.lines.has(i)) continue;
      const item = this.items[i];
      const node = element("div", {
        class: "line", role: "row", tabindex: "0", "aria-rowindex": i + 1, "aria-selected": String(item === this.chosen),
        "data-item": item, style: { top: `${i * row}px` }, onclick: () => this.pick(item, true),
      });
      this.space.append(node);
      node.append(...this.cells(item));
      node.querySelectorAll("canvas").forEach((drawing) => drawing.draw());
      this.lines.set(i, node);
    }
  }
  // Arrow keys, Home and End move the focus between rows. Enter and space pick a row.
  step(event) {
    const node = event.target.closest(".line");
    if (!node) return;
    const i = Number(node.getAttribute("aria-rowindex")) - 1;
    const to = { ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: this.items.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.pick(this.items[i], true);
    else if (to === undefined || to < 0 || to >= this.items.length) return;
    else this.reach(to).focus();
    event.preventDefault();
  }
  reach(i) {
    const row = this.height, top = i * row;
    if (top < this.view.scrollTop) this.view.scrollTop = top;
    else if (top + row > this.view.scrollTop + this.view.clientHeight) this.view.scrollTop = top + row - this.view.clientHeight;
    this.show();
    return this.lines.get(i);
  }
  choose(item) {
    this.chosen = item;
    for (const [i, node] of this.lines) node.setAttribute("aria-selected", String(this.items[i] === item));
    const i = this.items.indexOf(item);
    if (i >= 0) this.reach(i);
  }
}
