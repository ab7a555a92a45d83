// What ranks exchange: on the wire, and before that waiting for each other.

import type { Choice } from "../choice";
import { element, section } from "../element";
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
  const turns = Math.max(1, now.turns.length) * moment.ranks.length;
  const sorted = [...groups.values()].sort((one, other) => other.wire + other.waiting - one.wire - one.waiting).slice(0, MOST);
  const longest = Math.max(1, ...sorted.map(({ wire, waiting }) => wire + waiting));
  const body = element("tbody", {}, ...sorted.map((one) => {
    const wide = (time: number) => ({ width: `${(100 * time) / longest}%` });
    return element("tr", {},
      element("th", { scope: "row", text: one.name }),
      element("td", {}, one.place === NONE ? null : placeButton(moment.places[one.place], choice)),
      element("td", { class: "figure", text: plural(Math.round(one.count / turns) || 1, "time") }),
      element("td", { class: "figure", text: one.size ? bytes(one.size / turns) : "" }),
      element("td", { class: "figure", text: duration(one.wire / turns) }),
      element("td", { class: "figure", text: duration(one.waiting / turns) }),
      element("td", {}, element("span", { class: "meter parted", "data-says": `On the wire ${duration(one.wire / turns)} a turn${one.size ? `, ${(one.size / Math.max(1, one.wire)).toFixed(1)} GB/s` : ""}; waiting for other ranks ${duration(one.waiting / turns)}.` },
        element("span", { class: "wire", look: wide(one.wire) }), element("span", { class: "part columns wide", look: { ...wide(one.waiting), "--fill": "var(--peer_late)" } }))),
    );
  }));
  const head = element("thead", {}, element("tr", {}, ...["collective", "launched at", "a turn", "size", "on the wire", "waiting", ""].map((name) => element("th", { scope: "col", text: name }))));
  const made = section("collectives", "Collectives", "", element("div", { class: "wide" }, element("table", { class: "copies" }, head, body)));
  made.querySelector("header")!.append(element("p", { class: "lead" }, "What a turn exchanges at each ", term("collective"), ", the mean of the ranks: solid is the wire, hatched is waiting for the last ", term("rank"), " to come."));
  return made;
}
