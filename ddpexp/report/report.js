"use strict";
// Draws what the element #data has. Every text of a run becomes a text node or an attribute that is no code.
const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const HEIGHT = 240, LEFT = 56, RIGHT = 12, TOP = 8, BOTTOM = 24;
const FEW = 10; // colours
const NEAR = 8; // lines of a tip
const BARS = 24; // that are shown at once

function make(space, name, attributes, children) {
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.setAttribute("class", value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}
const html = (name, attributes = {}, ...children) => make("http://www.w3.org/1999/xhtml", name, attributes, children);
const svg = (name, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}
const shown = (metric, value) => (metric.includes("accuracy") ? `${(100 * value).toFixed(2)}%` : number(value));
const whole = (value) => Math.round(value).toLocaleString("en-US");

// Runs: colours, which are shown, which one is pointed at.
const runs = data.runs.map((run) => {
  const curves = {};
  for (const [metric, curve] of Object.entries(run.curves)) {
    let step = 0;
    const x = curve.x.map((distance) => (step += distance));
    curves[metric] = { x, y: curve.y, mean: curve.mean };
  }
  return { ...run, curves, isShown: true, colour: "var(--c0)", marks: [] };
});

function ramp(part) {
  return part < 0.5
    ? `color-mix(in oklab, var(--r0), var(--r1) ${200 * part}%)`
    : `color-mix(in oklab, var(--r1), var(--r2) ${200 * part - 100}%)`;
}
function coloursOf(values) {
  const distinct = [...new Set(values)];
  if (distinct.every((value) => value !== "" && isFinite(value))) distinct.sort((a, b) => a - b);
  const colour = (i) => (distinct.length <= FEW ? `var(--c${i})` : ramp(i / (distinct.length - 1)));
  return new Map(distinct.map((value, i) => [value, colour(i)]));
}
function swatch(colour, block) {
  const made = html("span", { class: block ? "swatch block" : "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}
function colourRuns() {
  const key = get("colour").value;
  const values = key === "" ? runs.map((_, i) => String(i)) : data.keys[key];
  const colours = coloursOf(values);
  runs.forEach((run, i) => {
    run.colour = colours.get(values[i]);
    if (run.swatch) run.swatch.style.background = run.colour;
  });
  const entries = [...colours];
  const isLong = entries.length > FEW;
  const listed = isLong ? [entries[0], entries[Math.floor(entries.length / 2)], entries[entries.length - 1]] : entries;
  const name = (value) => (key === "" ? runs[Number(value)].name : value || "-");
  get("legend").replaceChildren(
    html("span", {}, key === "" ? (isLong ? "from the first run of the table to the last:" : "") : key),
    ...listed.map(([value, colour]) => html("span", {}, swatch(colour), name(value))),
  );
  get("legend").hidden = runs.length < 2;
}
function point(at) {
  runs.forEach((run, i) => {
    const isHigh = i === at && run.isShown;
    for (const mark of run.marks) mark.classList.toggle("high", isHigh);
  });
  for (const picture of document.querySelectorAll("svg.lines")) {
    picture.classList.toggle("some", at !== null && runs.length > 1 && runs[at].isShown);
  }
}

// Tables.
function table(grid, first) {
  const body = html("tbody");
  const lines = grid.lines.map((cells, i) => {
    const line = html("tr", { class: i === grid.best ? "best" : "" }, first ? first(i) : null,
      ...cells.map((cell, j) => html("td", { class: `${grid.right[j] ? "right" : ""} ${j === grid.status ? cell : ""}`,
        title: j === grid.status ? runs[i].meaning : cell.length > 40 ? cell : null }, cell)));
    body.append(line);
    return line;
  });
  let sorted = null, sign = 1;
  const key = (i, j) => (grid.numbers && grid.numbers[i][j] !== null ? grid.numbers[i][j] : grid.lines[i][j]);
  function sortBy(j, head) {
    sign = sorted === j ? -sign : 1;
    sorted = j;
    const order = grid.lines.map((_, i) => i);
    order.sort((a, b) => {
      const [one, other] = [key(a, j), key(b, j)];
      if (one === "" || other === "") return (one === "") - (other === "");
      const isNumeric = isFinite(one) && isFinite(other);
      return sign * (isNumeric ? one - other : String(one).localeCompare(String(other)));
    });
    for (const cell of head.parentNode.children) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...order.map((i) => lines[i]));
  }
  const heads = grid.head.map((name, j) => {
    const head = html("th", { scope: "col", class: grid.right[j] ? "right" : "" });
    head.append(html("button", { type: "button", title: "sort", onclick: () => sortBy(j, head) }, name));
    return head;
  });
  const whole = html("table", {}, html("thead", {}, html("tr", {}, first ? html("td") : null, ...heads)), body);
  return { lines, element: html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, whole) };
}
function keysAndValues(lines) {
  const rows = lines.map(([key, ...children]) =>
    html("tr", {}, html("th", { scope: "row", class: "key" }, key), html("td", { class: "wrap" }, ...children)));
  return html("div", { class: "scroll" }, html("table", {}, html("tbody", {}, ...rows)));
}
function remove(id) {
  get(id).remove();
}

function showSummary() {
  get("title").textContent = data.title;
  get("made").textContent = `ddpexp ${data.version}, ${data.made}`;
  get("footer").append("made by ", html("code", {}, data.command));
  const verdicts = runs.filter((run) => run.verdict).map((run) => [run, run.verdict]);
  const messages = runs.filter((run) => run.message).map((run) => [run, `${run.status}: ${run.message}`]);
  const lines = [...messages, ...verdicts].map(([run, text]) =>
    html("li", {}, runs.length > 1 ? html("code", {}, run.name) : null, runs.length > 1 ? " " : null, text));
  get("summary").append(
    html("p", { class: "first" }, data.summary),
    ...data.notes.map((note) => html("p", { class: "note" }, note)),
    ...(lines.length > 6
      ? [html("details", {}, html("summary", {}, `${lines.length} messages`), html("ul", {}, ...lines))]
      : lines.length ? [html("ul", {}, ...lines)] : []),
  );
}
function showRuns() {
  if (!runs.length) return remove("runs");
  const made = table(data.table, runs.length < 2 ? null : (i) => {
    const run = runs[i];
    run.swatch = swatch(run.colour);
    const box = html("input", { type: "checkbox", checked: true, "aria-label": `show ${run.name}`, onchange: () => {
      run.isShown = box.checked;
      run.line.classList.toggle("off", !box.checked);
      drawCurves();
      drawAxes();
    } });
    return html("td", { class: "name", title: run.name }, html("label", {}, box, " ", run.swatch, " ", run.name));
  });
  made.lines.forEach((line, i) => {
    runs[i].line = line;
    line.addEventListener("pointerenter", () => { point(i); line.classList.add("high"); });
    line.addEventListener("pointerleave", () => { point(null); line.classList.remove("high"); });
  });
  get("runs").append(made.element);
}
function showSeeds() {
  if (!data.seeds) return remove("seeds");
  get("seeds").append(table(data.seeds).element);
}

// Axes of charts.
function scale(low, high, from, to, isLog) {
  const f = isLog ? Math.log10 : (value) => value;
  const [a, b] = [f(low), f(high)];
  const span = b - a || 1;
  const at = (value) => from + ((f(value) - a) / span) * (to - from);
  at.back = (place) => {
    const value = a + ((place - from) / (to - from)) * span;
    return isLog ? 10 ** value : value;
  };
  return at;
}
function ticks(low, high, isLog, most) {
  if (isLog) {
    const found = [];
    const decades = Math.log10(high / low);
    const parts = decades > 2 ? [1] : decades > 1 ? [1, 3] : [1, 2, 3, 5, 7];
    const every = Math.max(1, Math.ceil(decades / most));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
      for (const part of parts) {
        const value = part * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    if (found.length > 1) return found;
  }
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((value) => value >= rough) || rough;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 20; i++) found.push(i * step);
  return found;
}
function quantile(sorted, part) {
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
}
function rangeOf(values, isLog) {
  const sorted = Float64Array.from(values.filter((value) => !isLog || value > 0)).sort();
  if (!sorted.length) return null;
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (!get("outliers").checked && sorted.length > 20) {
    const [a, b] = [quantile(sorted, 0.02), quantile(sorted, 0.98)];
    const room = isLog ? 0 : 1.5 * (b - a);
    if (isLog) {
      if (high > b * 1e3) high = b * 10;
      if (low < a / 1e3) low = a / 10;
    } else if (b > a) {
      high = Math.min(high, b + room);
      low = Math.max(low, a - room);
    }
  }
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const margin = isLog ? 0 : 0.04 * (high - low);
  return [low - (low >= 0 && low - margin < 0 ? 0 : margin), high + margin];
}

// Curves.
function epochAt(run, step) {
  const points = run.epochs;
  if (!points.length) return null;
  let i = points.findIndex(([at]) => at >= step);
  if (i < 0) i = points.length - 1;
  const [[a, from], [b, to]] = [i ? points[i - 1] : [0, 0], points[i]];
  return b === a ? to : from + ((step - a) / (b - a)) * (to - from);
}
function smooth(values, weight) {
  let last = 0, sum = 0;
  return values.map((value) => {
    last = last * weight + (1 - weight) * value;
    sum = sum * weight + (1 - weight);
    return last / sum;
  });
}
function lineOf(run, metric) {
  const curve = run.curves[metric];
  if (!curve || !run.isShown) return null;
  const place = get("over").value === "step" ? (step) => step : (step) => epochAt(run, step);
  const weight = Number(get("smoothing").value);
  const raw = { x: curve.x.map(place), y: curve.y };
  if (raw.x[0] === null) return null;
  if (!weight) return { raw: null, x: raw.x, y: raw.y };
  const isThin = curve.mean.length > 0;
  const x = isThin ? curve.mean.map((_, i) => (raw.x[2 * i] + raw.x[2 * i + 1]) / 2) : raw.x;
  return { raw, x, y: smooth(isThin ? curve.mean : curve.y, weight) };
}
function pathOf(line, atX, atY, logX, logY) {
  let path = "", pen = "M";
  line.x.forEach((x, i) => {
    const y = line.y[i];
    if ((logX && x <= 0) || (logY && y <= 0)) return void (pen = "M");
    path += `${pen}${atX(x).toFixed(1)} ${Math.max(-9999, Math.min(9999, atY(y))).toFixed(1)}`;
    pen = "L";
  });
  return path;
}
const charts = data.metrics.map((metric, i) => {
  const picture = svg("svg", { class: "lines", tabindex: "0", role: "img" });
  const figure = html("figure", {}, html("h3", {}, metric), picture);
  return { metric, picture, figure, id: `clip-${i}`, at: null };
});
function drawChart(chart) {
  const { metric, picture } = chart;
  const width = Math.max(240, Math.round(picture.getBoundingClientRect().width) || 400);
  const [logX, logY] = [get("log-x").checked, get("log-y").checked];
  const lines = runs.map((run) => lineOf(run, metric));
  const drawn = lines.filter((line) => line);
  picture.replaceChildren();
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const rangeX = rangeOfX(drawn.flatMap((line) => [line.x[0], line.x.find((x) => x > 0) ?? line.x[0], line.x[line.x.length - 1]]), logX);
  const rangeY = rangeOf(drawn.flatMap((line) => [...line.y]), logY);
  picture.setAttribute("aria-label", `${metric} over ${get("over").value}s of ${drawn.length} runs`);
  chart.lines = null;
  if (!rangeX || !rangeY) {
    picture.append(svg("text", { x: LEFT, y: HEIGHT / 2 }, drawn.length ? "no positive value" : "nothing recorded"));
    return;
  }
  const atX = scale(...rangeX, LEFT, width - RIGHT, logX), atY = scale(...rangeY, HEIGHT - BOTTOM, TOP, logY);
  for (const value of ticks(...rangeY, logY, 5)) {
    const y = atY(value).toFixed(1);
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, metric.includes("accuracy") ? `${number(100 * value)}%` : number(value)));
  }
  for (const value of ticks(...rangeX, logX, Math.max(2, Math.floor(width / 90)))) {
    picture.append(svg("text", { x: atX(value).toFixed(1), y: HEIGHT - 6, "text-anchor": "middle" }, number(value)));
  }
  const clip = svg("clipPath", { id: chart.id }, svg("rect", { x: LEFT, y: TOP - 4, width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 8 }));
  const inside = svg("g", { "clip-path": `url(#${chart.id})` });
  const order = lines.map((_, i) => i).sort((a, b) => (a === data.best) - (b === data.best));
  for (const i of order) {
    const [run, line] = [runs[i], lines[i]];
    if (!line) continue;
    const kind = i === data.best && runs.length > 1 ? "best" : runs.length > FEW ? "many" : "";
    for (const [of, extra] of [[line.raw, "raw"], [line, ""]]) {
      if (!of || (extra && runs.length > FEW)) continue;
      const mark = svg("path", { class: `curve ${extra || kind}`, d: pathOf(of, atX, atY, logX, logY) });
      mark.style.stroke = run.colour;
      inside.append(mark);
      if (!extra) run.marks.push(mark);
    }
    if (line.x.length === 1) {
      const dot = svg("circle", { cx: atX(line.x[0]), cy: atY(line.y[0]), r: 3 });
      dot.style.fill = run.colour;
      inside.append(dot);
    }
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(clip, inside, cross);
  Object.assign(chart, { lines, atX, atY, rangeX, cross, width });
}
function rangeOfX(values, isLog) {
  const usable = values.filter((value) => value !== null && (!isLog || value > 0));
  if (!usable.length) return null;
  const [low, high] = [Math.min(...usable), Math.max(...usable)];
  return isLog ? [low, high > low ? high : low * 2] : [Math.min(0, low), high > Math.min(0, low) ? high : 1];
}
function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return value - sorted[low] < sorted[high] - value ? low : high;
}
function showAt(chart, x, y, corner) {
  if (!chart.lines) return;
  const place = Math.max(chart.rangeX[0], Math.min(chart.rangeX[1], chart.atX.back(x)));
  const found = [];
  chart.lines.forEach((line, i) => {
    if (!line) return;
    const at = nearest(line.x, place);
    const gap = Math.abs(chart.atX(line.x[at]) - chart.atX(place));
    const isWithin = place >= line.x[0] && place <= line.x[line.x.length - 1];
    if (isWithin || gap < 24) found.push({ i, x: line.x[at], value: line.y[at], far: Math.abs(chart.atY(line.y[at]) - y) });
  });
  if (!found.length) return hideTip(chart);
  const near = found.reduce((one, other) => (other.far < one.far ? other : one));
  found.sort((one, other) => one.far - other.far);
  const listed = found.slice(0, NEAR).sort((one, other) => other.value - one.value);
  const over = get("over").value;
  tip(corner, `${over} ${over === "step" ? whole(near.x) : near.x.toFixed(2)}`, listed.map(({ i, value }) => [
    runs[i].colour, `${shown(chart.metric, value)}${runs.length > 1 ? `  ${runs[i].name}` : ""}`, i === near.i && runs.length > 1,
  ]), found.length - listed.length);
  const crossing = chart.atX(near.x);
  for (const end of ["x1", "x2"]) chart.cross.setAttribute(end, crossing);
  chart.cross.setAttribute("visibility", "visible");
  point(near.i);
}
function tip(corner, title, lines, more) {
  const box = get("tip");
  box.replaceChildren(html("div", {}, title),
    ...lines.map(([colour, text, isNear]) => html("div", { class: isNear ? "near" : "" }, swatch(colour), text)),
    ...(more > 0 ? [html("div", {}, `and ${more} more`)] : []));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const [x, y] = corner;
  box.style.left = `${Math.max(4, x + width + 20 > innerWidth ? x - width - 16 : x + 16)}px`;
  box.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, y + 12))}px`;
}
function hideTip(chart) {
  get("tip").hidden = true;
  if (chart && chart.cross) chart.cross.setAttribute("visibility", "hidden");
  point(null);
}
function listen(chart) {
  const { picture } = chart;
  const inside = (event) => {
    const box = picture.getBoundingClientRect();
    const unit = (chart.width || box.width) / box.width;
    return [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
  };
  for (const name of ["pointermove", "pointerdown"]) {
    picture.addEventListener(name, (event) => showAt(chart, ...inside(event), [event.clientX, event.clientY]));
  }
  picture.addEventListener("pointerleave", () => hideTip(chart));
  picture.addEventListener("blur", () => hideTip(chart));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return hideTip(chart);
    if (!step || !chart.lines) return;
    event.preventDefault();
    const x = chart.at === null ? (step > 0 ? LEFT : chart.width - RIGHT) : chart.at + step * 12;
    chart.at = Math.max(LEFT, Math.min(chart.width - RIGHT, x));
    const box = picture.getBoundingClientRect();
    showAt(chart, chart.at, HEIGHT / 2, [box.left + (chart.at * box.width) / chart.width, box.top + box.height / 2]);
  });
}
function drawCurves() {
  if (!charts.length) return;
  for (const run of runs) run.marks = run.line && runs.length > 1 ? [run.line] : [];
  const wanted = get("filter").value.toLowerCase();
  for (const chart of charts) {
    chart.figure.hidden = !chart.metric.toLowerCase().includes(wanted);
    if (!chart.figure.hidden) drawChart(chart);
  }
}
function showCurves() {
  if (!charts.length) return remove("curves");
  if (runs.every((run) => !run.epochs.length)) get("over").disabled = true;
  get("colour").append(html("option", { value: "" }, "run"), ...Object.keys(data.keys).map((key) => html("option", { value: key }, key)));
  get("colour").value = runs.length > FEW ? data.colour : "";
  get("colour").parentNode.hidden = runs.length < 2;
  get("charts").append(...charts.map((chart) => chart.figure));
  charts.forEach(listen);
  get("controls").addEventListener("input", () => {
    get("smoothed").value = get("smoothing").value;
    colourRuns();
    drawCurves();
    drawAxes();
  });
  get("controls").addEventListener("submit", (event) => event.preventDefault());
}

// Parallel coordinates.
function drawAxes() {
  if (!data.axes.length) return;
  const picture = get("parallel");
  const height = 300, top = 34, bottom = 16;
  const width = Math.max(120 * data.axes.length, Math.round(picture.parentNode.getBoundingClientRect().width) - 22);
  const at = (i) => 70 + (i * (width - 140)) / (data.axes.length - 1);
  const y = (place) => height - bottom - place * (height - top - bottom);
  picture.replaceChildren();
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.style.minWidth = `${Math.min(width, 110 * data.axes.length)}px`;
  const order = runs.map((_, i) => i).sort((a, b) => (a === data.best) - (b === data.best));
  const results = data.axes[data.axes.length - 1].places;
  const ranks = runs.map((_, i) => i).filter((i) => results[i] !== null).sort((a, b) => (data.max ? -1 : 1) * (results[a] - results[b]));
  for (const i of order) {
    const places = data.axes.map((axis) => axis.places[i]);
    if (!runs[i].isShown) continue;
    let path = "", pen = "M";
    places.forEach((place, j) => {
      if (place === null) return void (pen = "M");
      path += `${pen}${at(j).toFixed(1)} ${y(place).toFixed(1)}`;
      pen = "L";
    });
    const mark = svg("path", { class: `curve ${i === data.best ? "best" : "many"}`, d: path });
    mark.style.stroke = results[i] === null ? "var(--line)" : ramp(ranks.indexOf(i) / Math.max(1, ranks.length - 1));
    mark.addEventListener("pointerenter", (event) => {
      point(i);
      const colour = mark.style.stroke;
      tip([event.clientX, event.clientY], runs[i].name, data.axes.map((axis) => [colour, `${axis.name} ${axis.texts[i]}`, false]), 0);
    });
    mark.addEventListener("pointerleave", () => hideTip(null));
    runs[i].marks.push(mark);
    picture.append(mark);
  }
  data.axes.forEach((axis, j) => {
    const x = at(j).toFixed(1);
    const name = axis.name.length > 22 ? `…${axis.name.slice(-21)}` : axis.name;
    picture.append(svg("line", { class: "axis", x1: x, x2: x, y1: y(0), y2: y(1) }),
      svg("text", { x, y: 14, "text-anchor": "middle" }, name, svg("title", {}, axis.name)));
    const most = 12;
    const every = Math.ceil(axis.ticks.length / most);
    axis.ticks.filter((_, k) => k % every === 0).forEach(([place, text]) => picture.append(
      svg("text", { class: "tick", x: Number(x) + 5, y: y(place) + 4 }, text.length > 16 ? `${text.slice(0, 15)}…` : text)));
  });
}
function showAxes() {
  if (!data.axes.length) return remove("axes");
  get("axes").append(
    html("p", { class: "legend" }, `${data.axes[data.axes.length - 1].name}:`, ...[["best", 0], ["middle", 0.5], ["worst", 1]].map(
      ([name, part]) => html("span", {}, swatch(ramp(part)), name))),
    html("figure", { class: "wide" }, svg("svg", { id: "parallel", class: "lines", role: "img",
    "aria-label": `parallel coordinates of ${runs.length} runs: ${data.axes.map((axis) => axis.name).join(", ")}` })));
}

// Times of the steps.
function seconds(value) {
  return value >= 1 ? `${value.toPrecision(3)} s` : value >= 1e-3 ? `${(1e3 * value).toPrecision(3)} ms` : `${(1e6 * value).toPrecision(3)} µs`;
}
function showTimes() {
  const isOne = runs.length === 1;
  const bars = isOne ? runs[0].spans : runs.flatMap((run) => run.times.map((bar) => ({ ...bar, label: run.name })));
  if (!bars.length) return remove("times");
  const sums = bars.map((bar) => bar.phases.reduce((a, b) => a + b, 0));
  const longest = Math.max(...sums);
  const used = data.phases.filter((_, j) => bars.some((bar) => bar.phases[j] > 0));
  const colour = (phase) => `var(--c${data.phases.indexOf(phase)})`;
  const rows = bars.map((bar, i) => {
    const parts = data.phases.map((phase, j) => {
      const text = `${phase} ${seconds(bar.phases[j])}, ${((100 * bar.phases[j]) / sums[i]).toFixed(0)}%`;
      const part = html("span", { title: text });
      part.style.background = colour(phase);
      part.style.width = `${(100 * bar.phases[j]) / longest}%`;
      return part;
    });
    const label = data.phases.map((phase, j) => `${phase} ${seconds(bar.phases[j])}`).join(", ");
    return html("div", { class: "bar" }, html("span", { title: bar.label }, bar.label),
      html("span", { class: "stack", role: "img", "aria-label": label }, ...parts), html("span", { class: "right" }, seconds(sums[i])),
      bar.slow ? html("span", { class: "slow" }, bar.slow) : null);
  });
  const more = rows.slice(BARS);
  get("times").append(
    html("p", { class: "legend" }, ...used.map((phase) => html("span", {}, swatch(colour(phase), true), phase))),
    ...rows.slice(0, BARS),
    ...(more.length ? [html("details", {}, html("summary", {}, `${more.length} more`), ...more)] : []),
  );
}

// Pictures, differences, environment.
function showPictures() {
  if (!data.pictures.length) return remove("pictures");
  const shots = data.pictures.flatMap(({ run, names }) => names.map(({ name, steps, addresses }) => {
    const last = steps.length - 1;
    const image = html("img", { src: addresses[last], alt: `${name} of ${runs[run].name}` });
    const step = html("span", { class: "note" }, `step ${whole(steps[last])}`);
    const slider = html("input", { type: "range", min: 0, max: last, value: last, "aria-label": `step of ${name}`, oninput: () => {
      image.src = addresses[Number(slider.value)];
      step.textContent = `step ${whole(steps[Number(slider.value)])}`;
    } });
    return html("figure", {}, html("h3", {}, name), runs.length > 1 ? html("p", { class: "note" }, runs[run].name) : null,
      image, last ? slider : null, step);
  }));
  get("pictures").append(html("div", { class: "shots" }, ...shots));
}
function names(numbers) {
  if (numbers.length > 3) return `${numbers.length} runs`;
  return numbers.map((i) => runs[i].name).join(", ");
}
function showDifferences() {
  if (!data.differences.length || runs.length < 1) return remove("differences");
  for (const { group, keys, more } of data.differences) {
    const lines = keys.map(({ key, values }) => [key, ...values.map(([value, numbers]) =>
      html("div", {}, value, runs.length > 1 ? html("span", { class: "note of" }, names(numbers)) : null))]);
    if (more) lines.push(["", `and ${more} more keys`]);
    get("differences").append(html("details", { open: keys.length <= 12 }, html("summary", {}, group), keysAndValues(lines)));
  }
}
function showEnvironment() {
  if (!data.environment.length) return remove("environment");
  for (const { group, lines } of data.environment) {
    get("environment").append(html("details", { open: lines.length <= 12 }, html("summary", {}, group), keysAndValues(lines)));
  }
}

get("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.style.colorScheme = isDark ? "light" : "dark";
  get("theme").textContent = isDark ? "dark" : "light";
});
if (matchMedia("(prefers-color-scheme: dark)").matches) get("theme").textContent = "light";
showSummary();
showRuns();
showSeeds();
showCurves();
showAxes();
showTimes();
showPictures();
showDifferences();
showEnvironment();
colourRuns();
drawCurves();
drawAxes();
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  drawCurves();
  drawAxes();
});
