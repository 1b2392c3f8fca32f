"use strict";
// What each query of a pattern reads, from the closed forms in the page: N is the context, q a query's position.
const data = JSON.parse(document.getElementById("data").textContent);
const N = data.context, grid = data.grid;
const CELLS = 256, SAMPLED = 16, VIEW_ROWS = 64, VIEW_COLUMNS = 128, SPANS = 5;
const by = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en");
let shown = 0, query = data.query, held = false, size = N, start = 0, cached = "";

// ---- rows

function bound([step, offset, least, most, grain], row, period) {
  let rest = row % period;
  rest -= rest % grain;
  return Math.floor(row / period) * step + Math.min(Math.max(rest + offset, least), most);
}

function folded([period, step, stride, shift], row) {
  return Math.floor(row / period) * step + row % period * stride + shift;
}

// The piece of [[row, value, slope], …] that holds a row, by its number.
function piece(pieces, row) {
  let low = 0, high = pieces.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pieces[middle][0] <= row) low = middle; else high = middle - 1;
  }
  return low;
}

function valueAt(pieces, row) {
  const [first, value, slope] = pieces[piece(pieces, row)];
  return value + (row - first) * slope;
}

// The keys of one query in a part: runs {first, width, count, step} of count blocks of width positions.
function runsOf(part, q) {
  let row = q;
  if (part.row_fold) row = folded(part.row_fold, q);
  else if (part.row_pieces) row = valueAt(part.row_pieces, q);
  const ends = part.bounds;
  const low = ends ? bound(ends.low, row, ends.period) : valueAt(part.low, row);
  const high = ends ? bound(ends.high, row, ends.period) : valueAt(part.high, row);
  if (low >= high) return [];
  if (part.key_pieces) return listed(part.key_pieces, low, high);
  if (!part.key_fold) return [{first: low, width: high - low, count: 1, step: 1}];
  const [period, step, stride] = part.key_fold;
  const at = (each) => folded(part.key_fold, each), runs = [];
  if (stride === 1) {
    for (let from = low; from < high;) {
      const whole = from % period === 0 ? Math.floor((high - from) / period) : 0;
      const width = whole ? period : Math.min(high - from, period - from % period);
      const count = Math.max(whole, 1);
      runs.push({first: at(from), width, count, step});
      from += width * count;
    }
  } else {
    for (let from = low; from < high;) {
      const last = Math.min(high, (Math.floor(from / period) + 1) * period);
      runs.push({first: at(from), width: 1, count: last - from, step: stride});
      from = last;
    }
  }
  return runs;
}

function listed(pieces, low, high) {
  const runs = [];
  for (let number = piece(pieces, low); number < pieces.length && pieces[number][0] < high; number++) {
    const [first, value, slope] = pieces[number];
    const from = Math.max(low, first), end = Math.min(high, number + 1 < pieces.length ? pieces[number + 1][0] : high);
    const at = value + (from - first) * slope;
    runs.push(slope === 1 ? {first: at, width: end - from, count: 1, step: 1} : {first: at, width: 1, count: end - from, step: slope});
  }
  return runs;
}

const rowOf = (pattern, q) => pattern.parts.map((part) => ({kind: part.kind, runs: runsOf(part, q)}));
const keysIn = (runs) => runs.reduce((sum, run) => sum + run.width * run.count, 0);

// All positions that a query reads, ascending: for tests, and for whoever has a console.
function positionsRead(number, q) {
  const found = [];
  for (const {runs} of rowOf(data.patterns[number], q))
    for (const run of runs)
      for (let block = 0; block < run.count; block++)
        for (let each = 0; each < run.width; each++) found.push(run.first + block * run.step + each);
  return found.sort((a, b) => a - b);
}

// ---- pictures

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Calls mark(first, end) with the part of each block that lies in [from, to).
function eachBlock(run, from, to, mark) {
  const first = Math.max(0, Math.ceil((from - run.first - run.width + 1) / run.step));
  const last = Math.min(run.count - 1, Math.floor((to - 1 - run.first) / run.step));
  for (let block = first; block <= last; block++) {
    const at = run.first + block * run.step;
    if (at < to && at + run.width > from) mark(Math.max(at, from), Math.min(at + run.width, to));
  }
}

function fit(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height(width)}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height(width) * scale);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  return context;
}

// The share of each cell's keys that a row of cells reads, by kind, from a few of its queries.
function coverage(pattern, queries, from, cells, width) {
  const covered = pattern.parts.map(() => new Float64Array(cells));
  for (const q of queries) rowOf(pattern, q).forEach(({runs}, part) => {
    const add = (first, end, weight) => {
      for (let cell = Math.floor((first - from) / width); cell < cells && from + cell * width < end; cell++)
        covered[part][cell] += weight * (Math.min(end, from + (cell + 1) * width) - Math.max(first, from + cell * width));
    };
    for (const run of runs) {
      const end = run.first + (run.count - 1) * run.step + run.width;
      if (run.count > 1 && run.step < width / 4)  // many blocks a cell: what they cover on the mean
        add(Math.max(run.first, from), Math.min(end, from + cells * width), run.width / run.step);
      else eachBlock(run, from, Math.min(from + cells * width, N), (first, last) => add(first, last, 1));
    }
  });
  return covered;
}

const sheet = document.createElement("canvas");

function drawSheet() {
  const name = [shown, start, size, colour("--cell")].join();
  if (name === cached) return;
  cached = name;
  const pattern = data.patterns[shown], width = Math.max(1, Math.ceil(size / CELLS)), cells = Math.ceil(size / width);
  sheet.width = sheet.height = cells;
  const context = sheet.getContext("2d");
  context.fillStyle = colour("--cell");
  context.fillRect(0, 0, cells, cells);
  for (let row = 0; row < cells; row++) {
    const first = start + row * width, last = Math.min(first + width, N) - 1, several = Math.min(SAMPLED, last - first + 1);
    if (several < 1) break;
    const queries = Array.from({length: several}, (_, n) => first + Math.round(n * (last - first) / Math.max(several - 1, 1)));
    const covered = coverage(pattern, queries, start, cells, width);
    for (let cell = 0; cell < cells; cell++) {
      let most = -1, total = 0;
      covered.forEach((each, part) => { total += each[cell]; if (each[cell] > 0 && (most < 0 || each[cell] >= covered[most][cell])) most = part; });
      if (pattern.causal && cell > row) { context.globalAlpha = 1; context.fillStyle = colourFuture; }
      else if (most < 0) continue;
      else { context.globalAlpha = 0.3 + 0.7 * Math.sqrt(Math.min(1, total / (several * width))); context.fillStyle = data.kinds[pattern.parts[most].kind].colour; }
      context.fillRect(cell, row, 1, 1);
    }
  }
  const cell = width > 1 ? `; a cell is ${number(width)} × ${number(width)} pairs, the stronger the more of them are read` : "";
  const sampled = width > SAMPLED ? ` (by ${SAMPLED} of its ${number(width)} queries)` : "";
  by("about-matrix").textContent = `Queries down, keys across: positions ${number(start)} to ${number(Math.min(start + size, N) - 1)} of ${number(N)}${cell}${sampled}.`;
}

let colourFuture = "";

function drawMatrix() {
  if (query < start || query >= start + size) start = Math.max(0, Math.min(N - size, query - (size >> 1)));
  colourFuture = colour("--future");
  drawSheet();
  const canvas = by("matrix"), context = fit(canvas, (width) => width);
  context.drawImage(sheet, 0, 0, canvas.width, canvas.height);
  const unit = canvas.width / (Math.ceil(size / Math.max(1, Math.ceil(size / CELLS))) * Math.max(1, Math.ceil(size / CELLS)));
  const y = (query - start) * unit, thick = Math.max(unit, 3);
  context.fillStyle = colour("--cell");
  context.fillRect(0, y - 1, canvas.width, thick + 2);
  context.fillStyle = colourFuture;
  if (data.patterns[shown].causal) context.fillRect((query - start + 1) * unit, y - 1, canvas.width, thick + 2);
  for (const {kind, runs} of rowOf(data.patterns[shown], query)) {
    context.fillStyle = data.kinds[kind].colour;
    for (const run of runs) {
      if (run.count > 4 * canvas.width) context.fillRect((run.first - start) * unit, y, run.count * run.step * unit, thick);
      else eachBlock(run, start, Math.min(start + size, N), (first, end) => context.fillRect((first - start) * unit, y, Math.max((end - first) * unit, 1), thick));
    }
  }
  context.strokeStyle = colour("--query");
  context.lineWidth = held ? 3 : 1.5;
  context.strokeRect(0.75, y - 1.5, canvas.width - 1.5, thick + 3);
}

// The rows and columns of cells that are shown around the query's.
function windowAround(cell) {
  const place = (at, of, most, before) => Math.min(Math.max(at - Math.min(before, most - 1), 0), of - Math.min(of, most));
  const row = Math.floor(cell / grid.columns), column = cell % grid.columns;
  return {
    row: place(row, grid.rows, VIEW_ROWS, VIEW_ROWS * 7 / 8), rows: Math.min(grid.rows, VIEW_ROWS),
    column: place(column, grid.columns, VIEW_COLUMNS, VIEW_COLUMNS / 2), columns: Math.min(grid.columns, VIEW_COLUMNS),
  };
}

let around = windowAround(0);

function drawView() {
  const own = Math.floor(query / grid.channels), canvas = by("view");
  around = windowAround(own);
  const {row, rows, column, columns} = around;
  const high = (width) => grid.name === "pixel" ? width * rows / columns : Math.min(Math.max(rows * 12, 60), width);
  const context = fit(canvas, high), x = canvas.width / columns, y = canvas.height / rows;
  const box = (cell, fill) => {
    const r = Math.floor(cell / grid.columns) - row, c = cell % grid.columns - column;
    if (r < 0 || r >= rows || c < 0 || c >= columns) return;
    context.fillStyle = fill;
    context.fillRect(Math.floor(c * x), Math.floor(r * y), Math.ceil(x), Math.ceil(y));
  };
  context.fillStyle = colour("--cell");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const future = colour("--future"), r = Math.floor(own / grid.columns) - row, c = own % grid.columns - column;
  if (data.patterns[shown].causal) {
    context.fillStyle = future;
    context.fillRect((c + 1) * x, r * y, canvas.width, y);
    context.fillRect(0, (r + 1) * y, canvas.width, canvas.height);
  }
  const from = row * grid.columns * grid.channels, to = Math.min(N, (row + rows) * grid.columns * grid.channels);
  let self = false;
  for (const {kind, runs} of rowOf(data.patterns[shown], query))
    for (const run of runs) eachBlock(run, from, to, (first, end) => {
      for (let at = first; at < end; at++) box(Math.floor(at / grid.channels), data.kinds[kind].colour);
      self = self || first <= query && query < end;
    });
  if (self) box(own, colour("--self"));
  context.strokeStyle = colour("--query");
  context.lineWidth = held ? 3 : 1.5;
  context.strokeRect(c * x, r * y, x, y);
}

// ---- words

function spans(runs) {
  const span = (at, width) => width > 1 ? `${number(at)}–${number(at + width - 1)}` : number(at);
  const told = [];
  for (const run of runs) {
    if (run.count <= 3) for (let block = 0; block < run.count; block++) told.push(span(run.first + block * run.step, run.width));
    else told.push(`${span(run.first, run.width)}, ${span(run.first + run.step, run.width)} … ${span(run.first + (run.count - 1) * run.step, run.width)}`);
  }
  return told.length > SPANS ? `${told.slice(0, SPANS).join(", ")} and ${number(told.length - SPANS)} more` : told.join(", ");
}

function key(fill) {
  const box = document.createElement("span");
  box.className = "key";
  box.style.background = fill;
  return box;
}

function tell() {
  const row = rowOf(data.patterns[shown], query), total = row.reduce((sum, {runs}) => sum + keysIn(runs), 0);
  const cell = Math.floor(query / grid.channels), place = `row ${number(Math.floor(cell / grid.columns))}, column ${number(cell % grid.columns)}`;
  const where = grid.name === "pixel" && grid.channels > 1 ? `${place}, channel ${query % grid.channels}` : place;
  const causal = data.patterns[shown].causal, most = causal ? query + 1 : N;
  by("told").textContent = `Query ${number(query)} (${where}) reads ${number(total)} of the ${number(most)} positions${causal ? " up to itself" : ""}: ${(100 * total / most).toPrecision(3)} %${held ? " · held" : ""}`;
  by("parts").replaceChildren(...row.filter(({runs}) => runs.length).map(({kind, runs}) => {
    const line = document.createElement("li");
    const keys = keysIn(runs);
    line.append(key(data.kinds[kind].colour), `${data.kinds[kind].word}: ${number(keys)} ${keys === 1 ? "key" : "keys"}, ${spans(runs)}`);
    return line;
  }));
  by("about-view").textContent = `The ${grid.name}s in ${number(grid.rows)} rows of ${number(grid.columns)}: rows ${number(around.row)} to ${number(around.row + around.rows - 1)}, columns ${number(around.column)} to ${number(around.column + around.columns - 1)}.`;
  if (document.activeElement !== by("query")) by("query").value = query;
  by("slide").value = query;
}

function draw() {
  drawMatrix();
  drawView();
  tell();
}

function show(q) {
  q = Math.min(Math.max(Math.trunc(q), 0), N - 1);
  if (Number.isNaN(q) || q === query) return;
  query = q;
  draw();
}

// ---- what a person does

function fractionOf(event) {
  const box = event.target.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

const pointed = {
  matrix: (event) => start + Math.floor(fractionOf(event)[1] * Math.ceil(size / Math.max(1, Math.ceil(size / CELLS))) * Math.max(1, Math.ceil(size / CELLS))),
  view: (event) => {
    const [x, y] = fractionOf(event);
    return ((around.row + Math.floor(y * around.rows)) * grid.columns + around.column + Math.floor(x * around.columns)) * grid.channels;
  },
};

for (const [id, at] of Object.entries(pointed)) {
  const canvas = by(id);
  canvas.addEventListener("pointermove", (event) => { if (!held && event.pointerType !== "touch") show(at(event)); });
  canvas.addEventListener("click", (event) => {
    if (held) { held = false; show(at(event)); } else { show(at(event)); held = true; }
    draw();
  });
  canvas.addEventListener("keydown", (event) => {
    const line = id === "view" ? grid.columns * grid.channels : 1;
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -line, ArrowDown: line, Home: -N, End: N}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(query + step * (event.shiftKey ? 100 : 1));
  });
}
by("query").addEventListener("input", (event) => { if (event.target.value !== "") show(Number(event.target.value)); });
by("query").addEventListener("blur", tell);
by("slide").addEventListener("input", (event) => show(Number(event.target.value)));
by("zoom").addEventListener("change", (event) => {
  size = Number(event.target.value);
  start = Math.max(0, Math.min(N - size, query - (size >> 1)));
  draw();
});

by("name").textContent = data.name;
by("about").textContent = data.about;
data.patterns.forEach((pattern, n) => {
  const label = document.createElement("label"), choice = document.createElement("input"), words = document.createElement("span"), small = document.createElement("small");
  Object.assign(choice, {type: "radio", name: "pattern", value: n, checked: n === 0});
  choice.addEventListener("change", () => { shown = n; draw(); });
  words.textContent = pattern.words;
  small.textContent = `${pattern.places} · ${pattern.share} % of the pairs · ${number(Math.round(10 * pattern.pairs / N) / 10)} keys a query`;
  words.append(small);
  label.append(choice, words);
  by("patterns").append(label);
});
for (let each = N; each >= 64 && by("zoom").options.length < 8; each = Math.ceil(each / 4)) {
  by("zoom").append(new Option(each === N ? "the whole context" : `${number(each)} positions around it`, each));
}
const legend = [...new Set(data.patterns.flatMap((pattern) => pattern.parts.map((part) => part.kind)))].sort((a, b) => a - b);
for (const [fill, word] of [...legend.map((kind) => [data.kinds[kind].colour, data.kinds[kind].word]), ["var(--self)", "itself"], ...(data.patterns.some((pattern) => pattern.causal) ? [["var(--future)", "still to come"]] : []), ["var(--cell)", "not read"]]) {
  const entry = document.createElement("span");
  entry.append(key(fill), word);
  by("legend").append(entry);
}
by("query").max = by("slide").max = N - 1;
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.body.dataset.ready = "1";
