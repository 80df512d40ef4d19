// Draws the charts, puts the incidents on them, and leads from each to its story.
(() => {
  "use strict";
  const drawn = JSON.parse(document.getElementById("drawn").textContent);
  const worst = ["calm", "good", "busy", "warn", "bad"];
  const plots = [];
  const stories = new Map(drawn.marks.map((mark) => [mark.anchor, document.getElementById(mark.anchor)]));
  const form = document.querySelector(".range");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colours = { measured: "curve", peak: "curve", second: "second", usual: "undone", undone: "undone" };
  const digits = (value, small = 1e-3) =>
    value == null ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < small)
      ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
      : String(Number(value.toPrecision(4)));
  // Those of one axis alike.
  const digitsOfAll = (values) => {
    const small = Math.max(...values.map((value) => Math.abs(value ?? 0))) < 0.01 ? 1 : 1e-3;
    return values.map((value) => (value == null ? "" : digits(value, small)));
  };
  const wholeSteps = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((power) => [power, 2 * power, 5 * power]);

  // ---- incidents on the charts ----

  // One mark for those that would lie over each other; in the colour of the worst.
  const grouped = (plot) => {
    const groups = [];
    let end = -Infinity;
    for (const mark of drawn.marks) {
      if (mark.step < plot.scales.x.min || mark.step > plot.scales.x.max) continue;
      const at = plot.valToPos(mark.step, "x");
      if (groups.length && at - 12 < end) groups.at(-1).marks.push(mark);
      else groups.push({ at, marks: [mark] });
      const { at: first, marks } = groups.at(-1);
      end = first + (marks.length > 1 ? 26 : 12);
    }
    return groups;
  };

  const placeMarks = (plot) => {
    const holder = plot.marks;
    const box = plot.over;
    holder.style.left = box.style.left;
    holder.style.top = `${parseFloat(box.style.top) - 27}px`;
    holder.style.width = box.style.width;
    holder.replaceChildren(...grouped(plot).map(({ at, marks }) => {
      const [first, last] = [marks[0], marks.at(-1)];
      const link = document.createElement("a");
      const tone = worst[Math.max(...marks.map((mark) => worst.indexOf(mark.tone)))];
      link.className = `mark-at ${tone}`;
      link.href = `#${first.anchor}`;
      link.style.left = `${at}px`;
      link.title = marks.length > 1
        ? `Incidents ${first.label} to ${last.label}, steps ${first.step} to ${last.step}; the first: ${first.title}`
        : first.title;
      link.setAttribute("aria-label", link.title);
      // Five charts with the same marks: the keyboard meets them once.
      if (plot !== plots[0]) {
        link.tabIndex = -1;
        link.setAttribute("aria-hidden", "true");
      }
      link.dataset.anchors = marks.map((mark) => mark.anchor).join(" ");
      const text = document.createElement("span");
      text.textContent = marks.length > 1 ? `${first.label}–${last.label}` : first.label;
      link.append(text);
      return link;
    }));
    pointOut();
  };

  const drawMarks = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { marks } of grouped(plot)) {
      for (const mark of marks) {
        const x = Math.round(plot.valToPos(mark.step, "x", true));
        ctx.strokeStyle = colour(mark.tone);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  };

  const pointOut = () => {
    const open = new Set([...stories].filter(([, story]) => story?.closest("details").open).map(([anchor]) => anchor));
    for (const link of document.querySelectorAll(".mark-at")) {
      link.classList.toggle("current", link.dataset.anchors.split(" ").some((anchor) => open.has(anchor)));
    }
  };

  // ---- charts ----

  const draw = (chart) => {
    const figure = document.getElementById(`chart-${chart.name}`);
    const place = figure.querySelector(".plot");
    const height = () => (place.clientWidth < 520 ? 190 : figure.classList.contains("first") ? 280 : 220);
    const ink = () => colour("soft");
    const decade = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
    const fewer = (plot, values) => values.map((value) => (!chart.logarithmic || decade(value) ? value : null));
    const grid = { stroke: () => colour("rule"), width: 1 };
    const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    // What the chart is about is drawn last, over the others; in the legend it comes first.
    const lines = [...chart.lines.slice(1).sort((one, other) => (other.kind === "undone") - (one.kind === "undone")), chart.lines[0]];
    const options = {
      width: place.clientWidth,
      height: height(),
      padding: [30, 14, 0, 0],
      scales: {
        x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: chart.logarithmic
          ? { distr: 3 }
          : { range: { min: { pad: 0.06, soft: 0, mode: chart.from_zero ? 1 : 0 }, max: { pad: 0.06, soft: 0, mode: 0 } } },
      },
      cursor: { sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false }, hover: { prox: 24 } },
      axes: [
        { stroke: ink, font, grid: { show: false }, ticks: grid, size: 30, incrs: wholeSteps, values: (plot, steps) => steps },
        { stroke: ink, font, grid: { ...grid, filter: fewer }, ticks: { show: false }, filter: fewer, size: 58, values: (plot, values) => digitsOfAll(values) },
      ],
      series: [
        { label: "step", value: (plot, step) => step ?? "–" },
        ...lines.map((line) => ({
          label: line.label,
          class: line.kind,
          stroke: () => colour(colours[line.kind]) + (line.kind === "peak" ? "66" : ""),
          width: line.kind === "measured" ? 1.8 : 1.4,
          dash: line.kind === "second" ? [6, 4] : line.kind === "usual" ? [2, 3] : undefined,
          points: { show: line.values.filter((value) => value != null).length < 40, size: 4 },
          value: (plot, value) => (value == null ? "–" : `${digits(value)}${chart.unit ? ` ${chart.unit}` : ""}`),
        })),
      ],
      hooks: { drawAxes: [drawMarks], draw: [placeMarks], setScale: [(plot, key) => key === "x" && tellRange(plot)] },
    };
    let plot;
    const live = document.createElement("div");
    options.hooks.init = [(made) => {
      made.marks = document.createElement("div");
      made.marks.className = "marks";
      made.root.querySelector(".u-wrap").append(made.marks);
      plots.push(made);
    }];
    place.append(live);
    try {
      plot = new uPlot(options, uPlot.join(lines.map((line) => [line.steps, line.values])), live);
    } catch (error) {
      place.textContent = "This chart could not be drawn; the console of the browser says why.";
      console.error(error);
      return;
    }
    plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", `${chart.title}: ${chart.summary}`);
    new ResizeObserver(() => {
      if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: height() });
    }).observe(place);
  };

  // ---- which steps are shown ----

  const tellRange = (plot) => {
    if (!form || plot !== plots[0]) return;
    form.elements.first.value = Math.ceil(plot.scales.x.min);
    form.elements.last.value = Math.floor(plot.scales.x.max);
  };
  const showSteps = (first, last) => {
    for (const plot of plots) plot.setScale("x", { min: first, max: Math.max(last, first + 1) });
  };

  // ---- stories ----

  const openStory = (anchor) => {
    const story = stories.get(anchor) ?? document.getElementById(anchor);
    const details = story?.closest("details");
    if (!details) return;
    details.open = true;
    const summary = details.querySelector("summary");
    summary.focus({ preventScroll: true });
    summary.scrollIntoView({ block: "start" });
  };

  drawn.charts.forEach(draw);
  if (plots.length) {
    const ends = drawn.range;
    showSteps(...ends);
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const [first, last] = [Number(form.elements.first.value), Number(form.elements.last.value)];
      showSteps(Math.min(first, last), Math.max(first, last));
    });
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      showSteps(...ends);
    });
    for (const button of document.querySelectorAll("button.show")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const step = Number(button.dataset.step);
        const around = Math.max(20, Math.round((ends[1] - ends[0]) / 50));
        showSteps(Math.max(ends[0], step - around), Math.min(ends[1], step + around));
        document.getElementById("charts").scrollIntoView();
      });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    const hash = link?.getAttribute("href");
    // The browser goes there by itself, and says so (hashchange): but not where it is already, and in a frame that a
    // tracker fills (srcdoc) it would load the page around the frame.
    if (!link || (hash !== location.hash && document.URL !== "about:srcdoc")) return;
    event.preventDefault();
    if (hash.startsWith("#incident-")) openStory(hash.slice(1));
    else document.querySelector(hash)?.scrollIntoView();
  });
  addEventListener("hashchange", () => openStory(location.hash.slice(1)));
  for (const details of document.querySelectorAll("details.incident")) details.addEventListener("toggle", pointOut);
  const all = document.querySelector("button.all");
  if (all) {
    all.hidden = false;
    all.addEventListener("click", () => {
      const closed = [...document.querySelectorAll("details.incident")].filter((details) => !details.open);
      for (const details of document.querySelectorAll("details.incident")) details.open = closed.length > 0;
      all.textContent = closed.length ? "Close all" : "Open all";
    });
  }
  if (location.hash.startsWith("#incident-")) openStory(location.hash.slice(1));
})();
