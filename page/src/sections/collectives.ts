// What ranks exchange: the transfer, and before it the wait for each other.

import type { Choice } from "../choice";
import { element, folded } from "../element";
import { term } from "../glossary";
import { launchOf } from "../run/replay";
import { Kind, NONE } from "../run/timeline";
import { bytes, duration, kernel, plural } from "../words";
import { placeButton } from "./causes";

const MOST = 12;

interface Exchanged {
  name: string;
  place: number;
  count: number;
  size: number;
  wire: number;
  waiting: number;
}

export function collectivesSection(choice: Choice): HTMLElement | null {
  const { moment, now } = choice;
  const { timeline, ratio } = moment;
  const launch = launchOf(timeline);
  const groups = new Map<string, Exchanged>();
  for (let row = 0; row < timeline.rows; row++) {
    const here = now.here[row];
    if (timeline.kind[row] !== Kind.COLLECTIVE || here === NONE) continue;
    const place = launch[row] === NONE ? NONE : moment.place[launch[row]];
    const name = kernel(moment.names[moment.name[row]]).replace(/^nccl(Dev)?Kernel_?/, "");
    const key = `${name} ${place}`;
    const group = groups.get(key) ?? { name, place, count: 0, size: 0, wire: 0, waiting: 0 };
    const wire = timeline.work[row] * ratio;
    group.count++;
    group.size += moment.size[row];
    group.wire += wire;
    group.waiting += Math.max(0, now.end[here] - now.start[here] - wire);
    groups.set(key, group);
  }
  if (!groups.size) return null;
  const iterations = Math.max(1, now.iterations.length) * moment.ranks.length;
  const sorted = [...groups.values()].sort((one, other) => other.wire + other.waiting - one.wire - one.waiting).slice(0, MOST);
  const longest = Math.max(1, ...sorted.map(({ wire, waiting }) => wire + waiting));
  const body = element("tbody", {}, ...sorted.map((one) => {
    const wide = (time: number) => ({ width: `${(100 * time) / longest}%` });
    return element("tr", {},
      element("th", { scope: "row", text: one.name }),
      element("td", {}, one.place === NONE ? null : placeButton(moment.places[one.place], choice)),
      element("td", { class: "figure", text: plural(Math.round(one.count / iterations) || 1, "time") }),
      element("td", { class: "figure", text: one.size ? bytes(one.size / iterations) : "" }),
      element("td", { class: "figure", text: duration(one.wire / iterations) }),
      element("td", { class: "figure", text: duration(one.waiting / iterations) }),
      element("td", {}, element("span", { class: "meter parted", "data-says": `Transfer: ${duration(one.wire / iterations)} per iteration${one.size ? `, ${(one.size / Math.max(1, one.wire)).toFixed(1)} GB/s` : ""}; wait for other ranks: ${duration(one.waiting / iterations)}.` },
        element("span", { class: "wire", look: wide(one.wire) }), element("span", { class: "part columns wide", look: { ...wide(one.waiting), "--fill": "var(--peer_late)" } }))),
    );
  }));
  const head = element("thead", {}, element("tr", {}, ...["collective", "launched at", "per iteration", "size", "transfer", "wait", ""].map((name) => element("th", { scope: "col", text: name }))));
  const [wire, waiting] = ["wire", "waiting"].map((part) => [...groups.values()].reduce((sum, one) => sum + one[part as "wire" | "waiting"], 0) / iterations);
  const about = element("p", { class: "lead" }, "Each ", term("collective"), " of an iteration, as a mean of the ranks. Solid: transfer. Hatched: wait for the last ", term("rank"), ".");
  return folded("collectives", "Collectives", `${duration(wire)} transfer and ${duration(waiting)} wait per iteration`, about, element("div", { class: "wide" }, element("table", { class: "copies" }, head, body)));
}
