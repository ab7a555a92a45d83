// When each rank arrives at each collective: a rank that is always late is a stripe.

import type { Choice } from "../choice";
import { element, folded } from "../element";
import { term } from "../glossary";
import type { Header } from "../run/run";
import { Kind, NONE, firstMarks } from "../run/timeline";
import { duration, leading, shortened } from "../words";

const CELL = 22;
const GUTTER = 64;
const TURNS = 18;

export function ranksSection(header: Header, choice: Choice): HTMLElement | null {
  const { moment, now } = choice;
  if (moment.ranks.length < 2) return null;
  const { timeline } = moment;
  const issued = new Map<number, number>();
  const arrivals = new Map<number, Map<number, number>>();
  for (let row = 0; row < timeline.rows; row++) {
    const meeting = timeline.meeting[row];
    if (timeline.kind[row] !== Kind.COLLECTIVE || meeting === NONE) continue;
    const here = arrivals.get(meeting) ?? new Map<number, number>();
    issued.set(meeting, issued.get(meeting) ?? row);
    here.set(timeline.lanes[timeline.lane[row]].rank, now.start[now.here[row]]);
    arrivals.set(meeting, here);
  }
  const meetings = [...arrivals].filter(([, here]) => here.size > 1).map(([meeting, here]) => ({ meeting, here, first: Math.min(...here.values()) }));
  if (!meetings.length) return null;
  meetings.sort((one, other) => one.first - other.first);
  const latest = Math.max(1, ...meetings.map(({ here, first }) => Math.max(...here.values()) - first));
  const canvas = element("canvas", { class: "heat", role: "img", "aria-label": "How late each rank arrives at each collective" });
  const says = element("p", { class: "faint", text: `${meetings.length} collectives in order. The darker a cell, the later the rank arrived.` });
  // the device may be behind: what counts is in which iteration the host issued it
  const marks = firstMarks(timeline);
  const iterationOf = meetings.map(({ meeting }) => marks.findLastIndex((mark) => mark <= issued.get(meeting)!));
  const wide = () => Math.max(1, (canvas.clientWidth || 600) - GUTTER) / meetings.length;
  const draw = (): void => {
    const context = canvas.getContext("2d")!;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    const height = moment.ranks.length * CELL + TURNS;
    canvas.width = canvas.clientWidth * density;
    canvas.height = height * density;
    canvas.style.setProperty("height", `${height}px`);
    context.setTransform(density, 0, 0, density, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    moment.ranks.forEach((rank, place) => {
      context.fillStyle = colour("--soft");
      context.fillText(`rank ${rank}`, 4, place * CELL + CELL / 2);
      context.fillStyle = colour("--paper");
      context.fillRect(GUTTER, place * CELL + 1, canvas.clientWidth - GUTTER, CELL - 2);
      context.fillStyle = colour("--peer_late");
      meetings.forEach(({ here, first }, at) => {
        const time = here.get(rank);
        if (time === undefined) return;
        context.globalAlpha = 0.06 + 0.94 * Math.sqrt((time - first) / latest);
        context.fillRect(GUTTER + at * wide(), place * CELL + 1, Math.max(1, wide() - 0.5), CELL - 2);
        context.globalAlpha = 1;
      });
    });
    context.fillStyle = colour("--soft");
    meetings.forEach((_, at) => {
      if (iterationOf[at] < 0 || iterationOf[at] === iterationOf[at - 1]) return;
      const x = GUTTER + at * wide();
      context.fillRect(Math.round(x), 0, 1, height - 6);
      if (at === 0 || x - GUTTER - wide() * meetings.findIndex((_, one) => iterationOf[one] === iterationOf[at - 1]) > 46) context.fillText(`iteration ${iterationOf[at] + 1}`, x + 4, height - TURNS / 2 + 1);
    });
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = meetings[Math.floor((event.clientX - box.left - GUTTER) / wide())];
    const rank = moment.ranks[Math.floor((event.clientY - box.top) / CELL)];
    const time = at?.here.get(rank);
    canvas.dataset.says = time === undefined ? "" : `Rank ${rank} arrived ${duration(time - at.first)} after the first at ${shortened(moment.names[moment.meetings.name[at.meeting]] ?? "", 60)}.`;
  });
  new ResizeObserver(draw).observe(canvas);
  document.addEventListener("recolour", draw);
  const late = moment.analysis.late.map((one) =>
    element("li", { text: `Rank ${one.rank} arrives ${duration(one.late)} late: ${header.looks[one.cause]?.name ?? one.cause}${one.where.text && leading(one.where.text) + one.where.text}.` }),
  );
  const about = element("p", { class: "lead" }, "A ", term("collective"), " waits for the last ", term("rank"), ". A rank that is always late is a stripe.");
  return folded("ranks", "Ranks", `the latest arrives ${duration(latest)} after the first`, about, canvas, says, late.length ? element("ul", {}, ...late) : null);
}
