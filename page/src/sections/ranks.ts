// When each rank comes to each collective: whoever is always late is a stripe.

import type { Choice } from "../choice";
import { element, section } from "../element";
import { term } from "../glossary";
import type { Header } from "../run/run";
import { Kind, NONE } from "../run/timeline";
import { duration, shortened } from "../words";

const CELL = 22;
const GUTTER = 64;

export function ranksSection(header: Header, choice: Choice): HTMLElement | null {
  const { moment, now } = choice;
  if (moment.ranks.length < 2) return null;
  const { timeline } = moment;
  const arrivals = new Map<number, Map<number, number>>();
  for (let row = 0; row < timeline.rows; row++) {
    const meeting = timeline.meeting[row];
    if (timeline.kind[row] !== Kind.COLLECTIVE || meeting === NONE) continue;
    const here = arrivals.get(meeting) ?? new Map<number, number>();
    here.set(timeline.lanes[timeline.lane[row]].rank, now.start[now.here[row]]);
    arrivals.set(meeting, here);
  }
  const meetings = [...arrivals].filter(([, here]) => here.size > 1).map(([meeting, here]) => ({ meeting, here, first: Math.min(...here.values()) }));
  if (!meetings.length) return null;
  meetings.sort((one, other) => one.first - other.first);
  const latest = Math.max(1, ...meetings.map(({ here, first }) => Math.max(...here.values()) - first));
  const canvas = element("canvas", { class: "heat", role: "img", "aria-label": "How late each rank comes to each collective" });
  const says = element("p", { class: "faint", text: `${meetings.length} collectives, in their order; the darker a cell, the later that rank came. The latest came ${duration(latest)} after the first.` });
  const wide = () => Math.max(1, (canvas.clientWidth || 600) - GUTTER) / meetings.length;
  const draw = (): void => {
    const context = canvas.getContext("2d")!;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    const height = moment.ranks.length * CELL + 4;
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
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = meetings[Math.floor((event.clientX - box.left - GUTTER) / wide())];
    const rank = moment.ranks[Math.floor((event.clientY - box.top) / CELL)];
    const time = at?.here.get(rank);
    if (time !== undefined) canvas.title = `rank ${rank}: ${duration(time - at.first)} after the first, at ${shortened(moment.names[moment.meetings.name[at.meeting]] ?? "", 60)}`;
  });
  new ResizeObserver(draw).observe(canvas);
  document.addEventListener("recolour", draw);
  const late = moment.told.late.map((one) =>
    element("li", { text: `Rank ${one.rank} arrives ${duration(one.late)} late: ${header.looks[one.cause]?.name ?? one.cause}${one.where.text ? ` at ${one.where.text}` : ""}.` }),
  );
  const made = section("ranks", "When the ranks arrive", "", canvas, says, late.length ? element("ul", {}, ...late) : null);
  made.querySelector("header")!.append(element("p", { class: "lead" }, "At a ", term("collective"), " nobody leaves before the last ", term("rank"), " has come: whoever is always late is a stripe."));
  return made;
}
