// Copies: from where, and how fast.

import type { Choice } from "../choice";
import { element, folded } from "../element";
import { launchOf } from "../run/replay";
import type { Header } from "../run/run";
import { Kind, NONE } from "../run/timeline";
import { bytes, duration, times } from "../words";
import { placeButton } from "./causes";

const DIRECTIONS = ["copy", "host to device", "device to host", "within the device", "within the host"];
const MOST = 12;
const LARGE = 65_536;

interface Copies {
  direction: string;
  memory: string;
  place: number;
  count: number;
  size: number;
  time: number;
  aside: number;
}

export function copiesSection(header: Header, choice: Choice): HTMLElement | null {
  const { moment, now } = choice;
  const { timeline } = moment;
  const launch = launchOf(timeline);
  const groups = new Map<string, Copies>();
  for (let row = 0; row < timeline.rows; row++) {
    if (timeline.kind[row] !== Kind.COPY) continue;
    const place = launch[row] === NONE ? NONE : moment.place[launch[row]];
    const memory = moment.pinned[row] === 1 ? "pinned" : moment.pinned[row] === 0 ? "pageable" : "";
    const direction = DIRECTIONS[moment.direction[row]] ?? DIRECTIONS[0];
    const key = `${direction} ${memory} ${place}`;
    const group = groups.get(key) ?? { direction, memory, place, count: 0, size: 0, time: 0, aside: NONE };
    group.count++;
    group.size += moment.size[row];
    group.time += timeline.end[row] - timeline.start[row];
    if (moment.aside[row] !== NONE) group.aside = moment.aside[row];
    groups.set(key, group);
  }
  if (!groups.size) return null;
  const iterations = Math.max(1, now.iterations.length) * moment.ranks.length;
  const rows = [...groups.values()].sort((one, other) => other.time - one.time).slice(0, MOST);
  // between host and device it is known what the link carries, or at least what the fastest copy reached
  const limitOf = (direction: string): [limit: number, what: string] => {
    const link = direction.includes("host") && direction.includes("device") ? moment.link : null;
    return link ? [link, `the link carries ${link.toFixed(1)} GB/s from pinned memory`] : [fastest.get(direction) ?? 0, `the fastest ${direction} here reached ${(fastest.get(direction) ?? 0).toFixed(1)} GB/s`];
  };
  const rate = ({ size, time }: Copies) => (time ? size / time : 0);
  const fastest = new Map<string, number>();
  for (const one of groups.values()) if (one.size / one.count >= LARGE) fastest.set(one.direction, Math.max(fastest.get(one.direction) ?? 0, rate(one)));
  const table = element("table", { class: "copies" },
    element("thead", {}, element("tr", {}, ...["copies", "launched at", "how often", "size", "time", "GB/s"].map((name) => element("th", { scope: "col", text: name })))),
  );
  const body = element("tbody");
  for (const one of rows) {
    const place = one.place === NONE ? null : moment.places[one.place];
    const [best, what] = limitOf(one.direction);
    const shared = Math.min(iterations, one.count); // of what is not copied in each iteration: a single copy
    const large = one.size / one.count >= LARGE;
    body.append(
      element("tr", {},
        element("th", { scope: "row" }, one.direction, one.memory ? element("span", { class: "faint", text: ` · ${one.memory}` }) : null),
        element("td", {}, place && placeButton(place, choice)),
        element("td", { class: "figure", text: times(one.count / iterations) }),
        element("td", { class: "figure", text: bytes(Math.round(one.size / shared)) }),
        element("td", { class: "figure", text: duration(one.time / shared) }),
        element("td", { class: "figure" },
          element("span", { class: "rate", "data-says": large ? `${rate(one).toFixed(1)} GB/s; ${what}.` : "A small copy takes as long as its call." },
            element("span", { class: "meter", "aria-hidden": "true" }, element("span", { look: { width: `${best ? Math.min(100, (100 * rate(one)) / best) : 0}%` } })),
            large ? rate(one).toFixed(1) : "small"),
          one.aside !== NONE ? element("span", { class: "faint", text: ` ${header.looks[moment.causes[one.aside]].name}` }) : null,
        ),
      ),
    );
  }
  table.append(body);
  const [size, time] = ["size", "time"].map((part) => [...groups.values()].reduce((sum, one) => sum + one[part as "size" | "time"], 0) / iterations);
  const about = `Each bar compares with ${moment.link ? `the link between CPU and GPU, ${moment.link.toFixed(1)} GB/s` : "the fastest large copy of this run in the same direction"}. Copies from pinned memory are faster.`;
  return folded("copies", "Copies", `${bytes(Math.round(size))} in ${duration(time)} per iteration`, element("p", { class: "lead", text: about }), element("div", { class: "wide" }, table));
}
