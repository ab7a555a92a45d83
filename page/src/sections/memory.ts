// What the device's memory held over the iterations: allocated as an area, reserved as a line above it, and who held the peak.

import type { Choice } from "../choice";
import { element, folded } from "../element";
import { term } from "../glossary";
import type { Peak } from "../run/run";
import { NONE, numbered, taken } from "../run/timeline";
import { bytes, exactDuration, share } from "../words";

const HEIGHT = 110;

/** One device's memory at the times of the view: each row holds until the next one. */
interface Held {
  peak: Peak;
  time: Float64Array;
  allocated: Float64Array;
  reserved: Float64Array;
}

function heldOf(choice: Choice, peak: Peak): Held {
  const { moment, now } = choice;
  const { rank, device, time, row, allocated, reserved } = moment.memory!;
  const mine = numbered(rank.length).filter((at) => rank[at] === peak.rank && device[at] === peak.device);
  const seen = (at: number): number => {
    const here = row[at] === NONE ? NONE : now.here[row[at]];
    return here === NONE ? 0 : Math.min(now.start[here] + time[at] - moment.timeline.start[row[at]], now.end[here]);
  };
  return { peak, time: new Float64Array(mine).map(seen), allocated: taken(allocated, mine), reserved: taken(reserved, mine) };
}

export function memorySection(choice: Choice): HTMLElement | null {
  const { moment } = choice;
  if (!moment.memory || !moment.peaks.length) return null;
  const devices = new Set(moment.peaks.map(({ device }) => device)).size > 1;
  const parts = moment.peaks.flatMap((peak) => {
    const named = [moment.ranks.length > 1 ? `Rank ${peak.rank}: ` : "", devices ? `Device ${peak.device}: ` : ""].join("");
    return [
      element("p", {}, named, named ? "at most " : "At most ", element("b", { text: `${bytes(peak.allocated)} allocated` }), ` of ${bytes(peak.reserved)} reserved.`),
      drawn(choice, heldOf(choice, peak)),
      holders(choice, peak),
    ];
  });
  const most = Math.max(...moment.peaks.map(({ allocated }) => allocated));
  const about = element("p", { class: "lead" }, "Memory ", term("allocated"), " by tensors over these iterations, and above it what PyTorch had ", term("reserved"), ". The table lists the lines that hold the peak.");
  return folded("memory", "Memory", `at most ${bytes(most)} allocated`, about, ...parts);
}

function holders(choice: Choice, peak: Peak): HTMLElement {
  const { places } = choice.moment;
  const row = (name: HTMLElement, size: number) => element("tr", {},
    element("th", { scope: "row" }, name),
    element("td", { class: "figure", text: bytes(size) }),
    element("td", { class: "figure", text: share(size, peak.allocated) }),
    element("td", {}, element("span", { class: "meter", "aria-hidden": "true" }, element("span", { look: { width: `${(100 * size) / Math.max(1, peak.allocated)}%` } }))),
  );
  return element("table", { class: "ledger holders" },
    ...peak.lines.map(([place, size]) => row(element("button", { type: "button", class: "place", text: places[place].text, on: { click: () => choice.line(places[place].file, places[place].line) } }), size)),
    peak.rest > 0 ? row(element("span", { class: "faint", text: "allocated earlier, or by an unknown line" }), peak.rest) : null,
  );
}

function drawn(choice: Choice, held: Held): HTMLCanvasElement {
  const { time, allocated, reserved, peak } = held;
  const { length, iterations } = choice.now;
  const canvas = element("canvas", { class: "heat", role: "img", "aria-label": `Memory over the iterations: at most ${bytes(peak.allocated)} allocated, ${bytes(peak.reserved)} reserved` });
  const top = 1.08 * Math.max(1, ...reserved, ...allocated);
  const draw = (): void => {
    const context = canvas.getContext("2d")!;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    const width = canvas.clientWidth;
    canvas.width = width * density;
    canvas.height = HEIGHT * density;
    canvas.style.setProperty("height", `${HEIGHT}px`);
    context.setTransform(density, 0, 0, density, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    context.fillStyle = colour("--paper");
    context.fillRect(0, 0, width, HEIGHT);
    const x = (at: number): number => (Math.min(Math.max(time[at], 0), length) / length) * width;
    const y = (size: number): number => HEIGHT - 1 - (size / top) * (HEIGHT - 2);
    const steps = (sizes: Float64Array): void => {
      context.beginPath();
      context.moveTo(0, y(sizes[0]));
      for (let at = 0; at < time.length; at++) {
        if (at) context.lineTo(x(at), y(sizes[at - 1]));
        context.lineTo(x(at), y(sizes[at]));
      }
      context.lineTo(width, y(sizes[sizes.length - 1]));
    };
    steps(allocated);
    context.lineTo(width, HEIGHT);
    context.lineTo(0, HEIGHT);
    context.fillStyle = colour("--collective");
    context.fill();
    steps(reserved);
    context.strokeStyle = colour("--ink");
    context.lineWidth = 1.5;
    context.stroke();
    context.setLineDash([2, 3]);
    context.strokeStyle = colour("--soft");
    for (const { start } of iterations) upright(context, (start / length) * width);
    context.setLineDash([]);
    context.strokeStyle = colour("--host_sync");
    context.lineWidth = 2;
    upright(context, x(allocated.lastIndexOf(peak.allocated)));
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const moment = ((event.clientX - box.left) / box.width) * length;
    const at = Math.max(0, time.findLastIndex((one) => one <= moment));
    canvas.dataset.says = `At ${exactDuration(moment)}: ${bytes(allocated[at])} allocated of ${bytes(reserved[at])} reserved.`;
  });
  new ResizeObserver(draw).observe(canvas);
  document.addEventListener("recolour", draw);
  return canvas;
}

function upright(context: CanvasRenderingContext2D, x: number): void {
  context.beginPath();
  context.moveTo(Math.round(x) + 0.5, 0);
  context.lineTo(Math.round(x) + 0.5, HEIGHT);
  context.stroke();
}
