"use strict";
// Interactive charts: the first click unpacks plotly from this page, whose policy allows that script by its hash. No network requests.
(() => {
  const boxes = new Map([...document.querySelectorAll(".interactive")].map((box) => [box.dataset.figure, box]));
  if (!boxes.size || typeof DecompressionStream === "undefined") return;
  const OVER_STEPS = ["step_times", "lateness"];
  const STEP = { ArrowLeft: -0.25, ArrowRight: 0.25 };
  const open = new Map(); // figure → the element that opened it, promise of its drawing, its whole range, what is marked
  let loading, specs, colours;

  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  // The policy forbids style attributes, but not styles that a script sets; plotly uses both.
  const withoutStyleAttributes = () => {
    const set = Element.prototype.setAttribute;
    Element.prototype.setAttribute = function (name, value) {
      if (name === "style") this.style.cssText = value;
      else set.call(this, name, value);
    };
  };
  const load = async () => {
    withoutStyleAttributes();
    const script = document.createElement("script");
    script.textContent = await unpacked("ddpdoctor-plotly");
    document.head.append(script);
    script.remove();
    if (typeof Plotly === "undefined") throw new Error("the browser did not run the chart library");
    specs = JSON.parse(await unpacked("ddpdoctor-figures"));
  };

  const paint = (value) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim());
    }
    // Long lists are numbers or names, without colours.
    if (Array.isArray(value)) return value.length > 50 ? value : value.map(paint);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, paint(item)]));
  };
  const figureOf = (name) => {
    colours = getComputedStyle(document.documentElement);
    const { data, layout } = specs[name];
    const alone = "open" in boxes.get(name).dataset; // on a page without the SVG chart, whose legend is used otherwise
    const axis = { gridcolor: "var(--rule)", zerolinecolor: "var(--rule)", linecolor: "var(--soft)" };
    const bare = {
      ...layout,
      title: undefined,
      height: layout.height ?? 340,
      showlegend: alone && (layout.showlegend ?? true),
      margin: { ...layout.margin, t: alone ? 40 : 16 },
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--ink)" },
      hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--soft)", font: { color: "var(--ink)" } },
    };
    return { data: paint(data.map((trace) => (trace.z ? { ...trace, showscale: alone } : trace))), layout: paint(bare) };
  };
  const plotOf = (name) => boxes.get(name).querySelector(".interactive-plot");
  const say = (name, words) => (boxes.get(name).querySelector(".interactive-words").textContent = words);

  const zoomed = (name, range) => {
    const { whole } = open.get(name);
    const width = Math.min(range[1] - range[0], whole[1] - whole[0]);
    const start = Math.max(whole[0], Math.min(range[0], whole[1] - width));
    return Plotly.relayout(plotOf(name), { "xaxis.range": [start, start + width] });
  };
  const by = (name, factor, shift) => {
    const [start, end] = plotOf(name).layout.xaxis.range;
    const middle = (start + end) / 2 + shift * (end - start);
    const half = ((end - start) * factor) / 2;
    return zoomed(name, [middle - half, middle + half]);
  };
  const reset = (name) =>
    Plotly.relayout(plotOf(name), { "xaxis.range": [...open.get(name).whole], "yaxis.autorange": open.get(name).y });

  const show = (name, opener) => {
    const entry = open.get(name) ?? {};
    entry.opener = opener;
    if (open.has(name)) return entry.drawn;
    open.set(name, entry);
    return (entry.drawn = draw(name, entry));
  };
  const draw = async (name, entry) => {
    const box = boxes.get(name);
    say(name, "Opening …");
    try {
      await (loading ??= load());
    } catch (error) {
      open.delete(name);
      say(name, `This browser cannot show it: ${error.message}.`);
      return false;
    }
    const plot = plotOf(name);
    plot.hidden = box.querySelector(".interactive-tools").hidden = false;
    box.parentElement.classList.add("interactive-on");
    box.querySelector(".interactive-open").setAttribute("aria-expanded", "true");
    const { data, layout } = figureOf(name);
    await Plotly.newPlot(plot, data, layout, { displayModeBar: false, responsive: true, showTips: false, doubleClick: false });
    Object.assign(entry, { whole: [...plot.layout.xaxis.range], y: layout.yaxis.autorange ?? true });
    say(name, "Drag to zoom, double-click for all. Keys: + and − zoom, arrows move, 0 shows all, Escape closes.");
    plot.on("plotly_doubleclick", () => reset(name));
    plot.on("plotly_relayout", (change) => follow(name, change));
    return true;
  };
  const follow = (name, change) => {
    // Both charts over the run show the same steps: they zoom and move together.
    if (!OVER_STEPS.includes(name) || !Object.keys(change).some((key) => key.startsWith("xaxis.range"))) return;
    const range = plotOf(name).layout.xaxis.range;
    for (const other of OVER_STEPS) {
      if (other === name || !open.get(other)?.whole) continue;
      const its = plotOf(other).layout.xaxis.range;
      if (Math.abs(its[0] - range[0]) + Math.abs(its[1] - range[1]) > 1e-6 * (range[1] - range[0])) {
        Plotly.relayout(plotOf(other), { "xaxis.range": [...range] });
      }
    }
  };
  const close = (name) => {
    const box = boxes.get(name);
    const { opener } = open.get(name);
    open.delete(name);
    Plotly.purge(plotOf(name));
    plotOf(name).hidden = box.querySelector(".interactive-tools").hidden = true;
    box.parentElement.classList.remove("interactive-on");
    box.querySelector(".interactive-open").setAttribute("aria-expanded", "false");
    say(name, "");
    opener.focus();
  };

  const lookAt = ({ first, last }, name) => {
    if (!first) return zoomed(name, open.get(name).whole);
    const beside = Math.max(3, 0.15 * (last - first));
    return zoomed(name, [first - beside, Number(last) + beside]);
  };
  const mark = async ({ first, last, ranks }, name) => {
    const plot = plotOf(name);
    const chosen = ranks ? ranks.split(",").map(Number) : [];
    const frame = { type: "rect", line: { color: "var(--link)", width: 1.5 }, layer: "above" };
    const shapes = first ? [{ ...frame, yref: "paper", y0: 0, y1: 1, x0: first - 0.5, x1: Number(last) + 0.5 }] : [];
    for (const [at, [low, high]] of (plot.layout.meta?.rows ?? []).entries()) {
      if (first || !chosen.some((rank) => rank >= low && rank <= high)) continue;
      shapes.push({ ...frame, xref: "paper", x0: 0, x1: 1, y0: at - 0.5, y1: at + 0.5 });
    }
    await Plotly.relayout(plot, { shapes: paint(shapes) });
    const names = plot.data.map((trace) => trace.name);
    const named = new Set(chosen.map((rank) => `rank ${rank}`).filter((each) => names.includes(each)));
    if (!named.size) return;
    await Plotly.restyle(plot, { opacity: names.map((each) => (named.has(each) ? 1 : 0.35)) });
  };
  const showFinding = async (button) => {
    const names = OVER_STEPS.filter((name) => boxes.has(name));
    for (const name of names) {
      if (!(await show(name, button))) return;
      open.get(name).marked = button.dataset;
      await lookAt(button.dataset, name);
      await mark(button.dataset, name);
      say(name, `${button.dataset.words}. Press Escape to go back to the finding.`);
    }
    boxes.get(names[0]).parentElement.scrollIntoView();
    plotOf(names[0]).focus({ preventScroll: true });
  };

  for (const [name, box] of boxes) {
    box.hidden = false;
    const opener = box.querySelector(".interactive-open");
    opener.addEventListener("click", async () => {
      if (open.get(name)?.whole) return close(name);
      if (await show(name, opener)) plotOf(name).focus({ preventScroll: true });
    });
    const acts = {
      in: () => by(name, 0.5, 0),
      out: () => by(name, 2, 0),
      left: () => by(name, 1, STEP.ArrowLeft),
      right: () => by(name, 1, STEP.ArrowRight),
      all: () => reset(name),
      close: () => close(name),
    };
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all", Escape: "close" };
    box.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || !open.get(name)?.whole || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      acts[act]();
    });
    for (const tool of box.querySelectorAll("[data-act]")) tool.addEventListener("click", () => acts[tool.dataset.act]());
    if ("open" in box.dataset) show(name, opener);
  }
  for (const button of document.querySelectorAll(".to-steps")) {
    button.hidden = !OVER_STEPS.some((name) => boxes.has(name));
    button.addEventListener("click", () => showFinding(button));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", async () => {
    for (const [name, { whole, marked }] of open) {
      if (!whole) continue;
      const { data, layout } = figureOf(name);
      layout.xaxis.range = [...plotOf(name).layout.xaxis.range];
      await Plotly.react(plotOf(name), data, layout);
      if (marked) await mark(marked, name);
    }
  });
})();
