"use strict";

// --- theme: as the system is, light, or dark ---

const THEMES = ["system", "light", "dark"];
const redraws = [];

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `Theme: ${name}`;
  for (const redraw of redraws) redraw();
}

document.getElementById("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));

// --- helpers ---

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const milliseconds = (seconds) => `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;

function bytes(count) {
  if (count < 1024) return `${Math.round(count)} B`;
  const units = ["KiB", "MiB", "GiB"];
  let unit = -1;
  do { count /= 1024; unit += 1; } while (count >= 1024 && unit < units.length - 1);
  return `${count.toFixed(1)} ${units[unit]}`;
}

function array(base64, Type) {
  const text = atob(base64);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) raw[i] = text.charCodeAt(i);
  return new Type(raw.buffer);
}

function decode(data) {
  const floats = ["disk", "asked", "arrived", "ended", "wait", "missed", "read", "seconds"];
  for (const name of floats) data[name] = array(data[name], Float32Array);
  data.choices = array(data.choices, Uint16Array);
  data.forward = array(data.forward, Uint32Array);
  const cells = data.tokens * data.layers;
  data.views = { hits: new Float32Array(cells), misses: new Float32Array(cells), reads: data.disk };
  for (let cell = 0; cell < cells; cell += 1) {
    let hits = 0;
    for (let k = 0; k < data.top_k; k += 1) hits += data.choices[cell * data.top_k + k] >> 15;
    data.views.hits[cell] = hits;
    data.views.misses[cell] = data.top_k - hits;
  }
  data.prompt = 0; // tokens before the first forward of a single one
  for (const count of data.forward_tokens) {
    if (count === 1) break;
    data.prompt += count;
  }
  return data;
}

// --- one trace ---

function showTrace(section) {
  const data = decode(JSON.parse(section.querySelector(".data").textContent));
  const find = (selector) => section.querySelector(selector);
  const cells = find(".cells"), layersAxis = find(".layers"), timeline = find(".timeline");
  if (!cells) return;
  const height = Math.max(8, Math.min(20, Math.floor(360 / data.layers)));
  const width = Math.max(data.tokens > 1000 ? 4 : 6, Math.min(20, Math.floor(840 / data.tokens)));
  const top = 20;
  const painted = document.createElement("canvas"); // the heat map without the mark
  let token = Math.min(data.prompt, data.tokens - 1), layer = 0;

  function prepared(canvas, wide, high) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colour("--soft");
    return context;
  }

  function drawHeat() {
    const view = find(".views input:checked").value;
    const values = data.views[view];
    const most = view === "reads" ? values.reduce((a, b) => Math.max(a, b), 0) : data.top_k;
    const low = channels(colour("--heat-low"));
    const high = channels(colour({ misses: "--heat-high", hits: "--heat-hits", reads: "--heat-reads" }[view]));
    const shades = Array.from({ length: 33 }, (_, i) => `rgb(${low.map((from, c) => Math.round(from + ((high[c] - from) * i) / 32))})`);
    find(".ramp .high").textContent = view === "reads" ? bytes(most) : `${most} experts`;
    find(".ramp i").style.background = `linear-gradient(90deg, ${shades[0]}, ${shades[32]})`;

    const axis = prepared(layersAxis, 30, top + data.layers * height);
    axis.textAlign = "right";
    const every = Math.ceil(14 / height) === 1 ? 1 : Math.ceil(data.layers / 8);
    for (let l = 0; l < data.layers; l += every) axis.fillText(String(l), 24, top + (l + 0.5) * height + 4);

    const context = prepared(painted, data.tokens * width + 24, top + data.layers * height);
    prepared(cells, data.tokens * width + 24, top + data.layers * height);
    const step = [1, 2, 5, 10, 20, 50, 100].find((count) => count * width >= 36) || 200;
    for (let t = 0; t < data.tokens; t += step) context.fillText(String(t), t * width + 1, 12);
    const gap = width > 3 ? 1 : 0;
    for (let t = 0; t < data.tokens; t += 1) {
      for (let l = 0; l < data.layers; l += 1) {
        const value = values[t * data.layers + l];
        context.fillStyle = shades[most ? Math.round((32 * value) / most) : 0];
        context.fillRect(t * width, top + l * height, width - gap, height - 1);
      }
    }
    context.fillStyle = colour("--ink");
    if (data.prompt > 0 && data.prompt < data.tokens) context.fillRect(data.prompt * width - 1, top - 4, 1.5, data.layers * height + 4);
    drawMark();
  }

  function drawMark() {
    const context = cells.getContext("2d"), wide = parseFloat(cells.style.width), high = parseFloat(cells.style.height);
    context.clearRect(0, 0, wide, high);
    context.drawImage(painted, 0, 0, wide, high);
    context.lineWidth = 2;
    context.strokeStyle = colour("--focus");
    context.strokeRect(token * width - 0.5, top + layer * height - 0.5, width, height);
  }

  function tell() {
    const forward = data.forward[token], cell = token * data.layers + layer, at = forward * data.layers + layer;
    const fed = data.forward_tokens[forward];
    find(".where").textContent = `Token ${token}, layer ${layer}: ${data.views.hits[cell]} hits, ${data.views.misses[cell]} misses` +
      (fed > 1 ? ` (one of ${fed} tokens fed together)` : "");
    const list = find(".experts");
    list.replaceChildren();
    for (let k = 0; k < data.top_k; k += 1) {
      const choice = data.choices[cell * data.top_k + k], item = document.createElement("li");
      const hit = choice >> 15;
      item.className = hit ? "hit" : "miss";
      item.textContent = `${choice & 32767} ${hit ? "hit" : "miss"}`;
      list.append(item);
    }
    find(".told .cost").textContent = `From the disk ${bytes(data.disk[cell])}; the layer waited ${milliseconds(data.wait[at])}` +
      ` and missed ${data.missed[at]} experts.`;
  }

  // The time line: x is the time since the forward began; one row for compute and waits, one for reads.
  function segments(forward) {
    const list = [];
    for (let l = 0, begin = 0; l < data.layers; l += 1) {
      const at = forward * data.layers + l, end = data.ended[at];
      const arrived = Math.min(Math.max(data.arrived[at], begin), end);
      list.push({ begin, end, arrived, asked: data.asked[at], wait: Math.min(data.wait[at], arrived - begin), missed: data.missed[at], read: data.read[at] });
      begin = end;
    }
    return list;
  }

  function drawTimeline() {
    const forward = data.forward[token], total = data.seconds[forward] || 1e-9, parts = segments(forward);
    const wide = Math.max(timeline.clientWidth, 280), x = (seconds) => 1 + ((wide - 2) * seconds) / total;
    const shapes = [];
    const svg = (name, attributes, content) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      if (content !== undefined) element.textContent = content;
      shapes.push(element);
    };
    const bar = (kind, from, to, y) => {
      if (to > from) svg("rect", { class: kind, x: x(from), y, width: Math.max(x(to) - x(from) - 0.5, 0.5), height: 22 });
    };
    const rough = total / (wide < 500 ? 4 : 8), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
    for (let tick = 0; tick <= total; tick += step) {
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: 62 });
      svg("text", { class: "tick", x: x(tick), y: 78, "text-anchor": tick === 0 ? "start" : x(tick) > wide - 20 ? "end" : "middle" },
        tick === 0 ? "0" : `${Number((1000 * tick).toPrecision(6))} ms`);
    }
    for (const part of parts) {
      bar("compute", part.begin, part.arrived - part.wait, 6);
      bar("wait", part.arrived - part.wait, part.arrived, 6);
      bar("compute", part.arrived, part.end, 6);
      if (part.missed) bar("read", part.asked, part.arrived, 34);
    }
    bar("head", parts[parts.length - 1].end, total, 6);
    const marked = parts[layer];
    svg("rect", { class: "marked", x: x(marked.begin), y: 2, width: Math.max(x(marked.end) - x(marked.begin), 2), height: 58 });
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("viewBox", `0 0 ${wide} 84`);
    picture.setAttribute("height", "84");
    picture.append(...shapes);
    timeline.replaceChildren(picture);
    const waited = parts.reduce((sum, part) => sum + part.wait, 0), read = data.total_read[forward];
    find(".moment").textContent = `Token ${token}: ${milliseconds(total)}, of which ${milliseconds(total - waited)} compute and ` +
      `${milliseconds(waited)} waiting; ${read < 0 ? "bytes read unknown" : `${bytes(read)} read from the disk`}. ` +
      `Layer ${layer}: ${milliseconds(marked.end - marked.begin)}, ${milliseconds(marked.wait)} waiting, ${marked.missed} experts missed.`;
  }

  function show() {
    drawMark();
    tell();
    drawTimeline();
  }

  function move(toToken, toLayer) {
    token = Math.max(0, Math.min(data.tokens - 1, toToken));
    layer = Math.max(0, Math.min(data.layers - 1, toLayer));
    const scroll = cells.parentElement, left = token * width;
    if (left < scroll.scrollLeft) scroll.scrollLeft = left - 20;
    else if (left + width > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = left + width + 20 - scroll.clientWidth;
    show();
  }

  function pointed(event) {
    const box = cells.getBoundingClientRect();
    const t = Math.floor((event.clientX - box.left) / width), l = Math.floor((event.clientY - box.top - top) / height);
    if (t >= 0 && t < data.tokens && l >= 0 && l < data.layers && (t !== token || l !== layer)) {
      token = t;
      layer = l;
      show();
    }
  }

  const steps = {
    ArrowLeft: () => move(token - 1, layer), ArrowRight: () => move(token + 1, layer),
    ArrowUp: () => move(token, layer - 1), ArrowDown: () => move(token, layer + 1),
    Home: () => move(0, layer), End: () => move(data.tokens - 1, layer),
    PageUp: () => move(token - 10, layer), PageDown: () => move(token + 10, layer),
  };
  cells.addEventListener("keydown", (event) => {
    if (!steps[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    steps[event.key]();
  });
  timeline.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(token, layer + step);
  });
  cells.addEventListener("pointermove", pointed);
  cells.addEventListener("pointerdown", pointed);
  timeline.addEventListener("pointermove", (event) => {
    const box = timeline.getBoundingClientRect(), forward = data.forward[token];
    const seconds = ((event.clientX - box.left) / box.width) * data.seconds[forward];
    const found = segments(forward).findIndex((part) => seconds < part.end);
    if (found >= 0 && found !== layer) move(token, found);
  });
  for (const input of section.querySelectorAll(".views input")) input.addEventListener("change", drawHeat);
  new ResizeObserver(drawTimeline).observe(timeline);
  redraws.push(drawHeat);
  drawHeat();
  show();
}

document.querySelectorAll(".trace").forEach(showTrace);
