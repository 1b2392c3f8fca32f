"use strict";
// Charts are whole without this. It adds: the values under the pointer, and a closer look at a part of the steps.

const SIDE = 1000;
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function scale(low, high, log) {
  const [from, to] = log ? [Math.log(low), Math.log(high)] : [low, high];
  return {
    at: value => SIDE * ((log ? Math.log(value) : value) - from) / (to - from),
    value: place => { const found = from + place / SIDE * (to - from); return log ? Math.exp(found) : found; },
  };
}

function ticks(low, high, log, most) {
  if (log) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    for (const parts of [[1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = first; power <= last; power++)
        for (const part of parts) { const value = part * 10 ** power; if (value >= low && value <= high) found.push(value); }
      if (found.length >= 2 && found.length <= most + 1) return found;
    }
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  const found = [];
  for (let place = Math.ceil(low / size - 1e-9); place <= Math.floor(high / size + 1e-9); place++) found.push(place * size);
  return found;
}

function short(value, digits = 4) {
  const size = Math.abs(value);
  for (const [limit, unit, prefix] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return `${Number((value / unit).toPrecision(3))}${prefix}`;
  if (size && size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 10 });
}

// Thousands are k from the first on: an axis has 5k beside 10k.
function tickText(value) {
  const size = Math.abs(value);
  return size >= 1e3 && size < 1e6 ? `${Number((value / 1e3).toPrecision(6))}k` : short(value);
}

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= wanted) low = middle; else high = middle; }
  return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
}

function enliven(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const frame = figure.querySelector(".frame"), axes = figure.querySelector(".axes"), plot = figure.querySelector(".plot");
  const x = scale(...data.x), y = scale(...data.y);
  const whole = { left: 0, right: SIDE, top: 0, bottom: SIDE };
  let view = whole, pressed = null;

  const line = element("line", { class: "pointer", y1: 0, y2: "100%" });
  const band = element("rect", { class: "band", y: 0, height: "100%" });
  axes.append(band, line);
  const tip = document.createElement("div");
  tip.className = "tip";
  const back = document.createElement("button");
  back.type = "button"; back.className = "back"; back.textContent = "show all"; back.hidden = true;
  frame.append(tip, back);

  const percent = (place, from, to) => 100 * (place - from) / (to - from);

  function drawTicks() {
    const across = axes.querySelector(".x"), up = axes.querySelector(".y");
    across.replaceChildren(); up.replaceChildren();
    for (const value of ticks(x.value(view.left), x.value(view.right), data.x[2], 5)) {
      const place = `${percent(x.at(value), view.left, view.right)}%`;
      across.append(element("line", { x1: place, x2: place, y1: "100%", y2: "100%" }), element("text", { x: place, y: "100%", dy: 17 }, tickText(value)));
    }
    for (const value of ticks(y.value(SIDE - view.bottom), y.value(SIDE - view.top), data.y[2], 5)) {
      const place = `${percent(SIDE - y.at(value), view.top, view.bottom)}%`;
      up.append(element("line", { x1: 0, x2: "100%", y1: place, y2: place }), element("text", { x: -6, y: place, dy: 4 }, tickText(value)));
    }
  }

  function show(wanted) {
    view = wanted;
    plot.setAttribute("viewBox", `${view.left} ${view.top} ${view.right - view.left} ${view.bottom - view.top}`);
    back.hidden = view === whole;
    drawTicks();
  }

  function closer(left, right) {
    let top = SIDE, bottom = 0;
    for (const curve of data.curves)
      curve.x.forEach((step, index) => {
        const place = x.at(step);
        if (place < left || place > right) return;
        const height = SIDE - y.at(curve.y[index]);
        top = Math.min(top, height); bottom = Math.max(bottom, height);
      });
    if (top > bottom) return;
    const room = 0.06 * (bottom - top) || 10;
    show({ left, right, top: top - room, bottom: Math.min(SIDE, bottom + room) });
  }

  function place(event) {
    const box = axes.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  }

  function read(event) {
    const share = place(event), wanted = x.value(view.left + share * (view.right - view.left));
    const rows = data.curves.filter(curve => curve.x.length).map(curve => {
      const index = nearest(curve.x, wanted);
      return { curve, step: curve.x[index], value: curve.y[index] };
    });
    if (!rows.length) return;
    const step = rows.reduce((a, b) => Math.abs(b.step - wanted) < Math.abs(a.step - wanted) ? b : a).step;
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `${data.name} ${step.toLocaleString("en-US")}`;
    tip.append(head);
    for (const row of rows) {
      const item = document.createElement("div"), dot = document.createElement("i"), name = document.createElement("span"), value = document.createElement("em");
      dot.className = `${row.curve.style} run-${row.curve.colour}`;
      name.textContent = row.curve.name + (row.step === step ? "" : ` at ${row.step.toLocaleString("en-US")}`);
      value.textContent = short(row.value, 5);
      item.append(dot, name, value);
      tip.append(item);
    }
    const across = `${percent(x.at(step), view.left, view.right)}%`;
    line.setAttribute("x1", across); line.setAttribute("x2", across);
    frame.classList.add("read");
    const box = axes.getBoundingClientRect(), around = frame.getBoundingClientRect();
    const at = box.left - around.left + share * box.width, room = tip.offsetWidth + 14;
    tip.style.left = `${Math.max(0, Math.min(at > box.width / 2 ? at - room : at + 14, around.width - tip.offsetWidth))}px`;
  }

  axes.addEventListener("pointermove", event => {
    read(event);
    if (pressed === null || event.pointerType === "touch") return;
    const [from, to] = [pressed, place(event)].sort((a, b) => a - b);
    band.setAttribute("x", `${100 * from}%`); band.setAttribute("width", `${100 * (to - from)}%`);
  });
  axes.addEventListener("pointerdown", event => { pressed = place(event); read(event); });
  axes.addEventListener("pointerup", event => {
    band.setAttribute("width", 0);
    if (pressed !== null && event.pointerType !== "touch") {
      const width = view.right - view.left, [from, to] = [pressed, place(event)].sort((a, b) => a - b);
      if (to - from > 0.02) closer(view.left + from * width, view.left + to * width);
    }
    pressed = null;
  });
  axes.addEventListener("pointerleave", () => { frame.classList.remove("read"); pressed = null; band.setAttribute("width", 0); });
  axes.addEventListener("dblclick", () => show(whole));
  back.addEventListener("click", () => show(whole));
}

for (const figure of document.querySelectorAll(".chart")) enliven(figure);
document.body.dataset.ready = "yes";
