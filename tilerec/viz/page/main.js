// Build the page, and redraw it when its width or colour scheme changes.

function drawAll() {
  readTheme();
  drawStep();
  drawLegend();
  rankList.redraw();
  tableList.redraw();
  drawRank();
  drawTable();
  drawOverviews();
  drawHosts();
}
readTheme();
makeMachines();
makeRanks();
makeTables();
wireOverviews();
chosenRank = largest(loadOf);
at("most-loaded").addEventListener("click", () => { pickRank(largest(loadOf), true); at("h-ranks").scrollIntoView(); });
at("to-tables").addEventListener("click", () => at("h-tables").scrollIntoView());
at("search").addEventListener("input", search);
if (data.notes.length) {
  at("notes-section").hidden = false;
  at("notes").append(...data.notes.map((note) => element("li", {}, note)));
}
search();
rankList.choose(chosenRank);
if (T) { chosenTable = tableList.items[0]; tableList.chosen = chosenTable; }
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
});
