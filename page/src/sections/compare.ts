// Two runs of one program: what changed, and what of it had been foretold.

import { element, section } from "../element";
import type { Changed, Compared, Header } from "../run/run";
import { change, duration, range, transition } from "../words";
import { bar, barRow, swatch } from "./ledger";

const said = ([before, after, significant]: Changed): string => (!significant ? "within noise" : before ? change(before, after) : "new");

export function compareSection(headers: Header[], done: Compared): HTMLElement {
  const [before, after, significant] = done.step;
  const names = headers[0].looks;
  const name = (place: string) => names[place]?.name ?? place;
  const headline = significant
    ? element("p", { class: "big" }, "A turn took ", element("b", { text: duration(before) }), " and takes ", element("b", { text: duration(after, before) }), `: ${change(before, after)}.`)
    : element("p", { class: "big", text: `A turn takes the same within noise: ${transition(before, after)}.` });
  const longest = Math.max(before, after);
  const bars = headers.map(({ told: [told] }, at) => barRow(at ? "after" : "before", bar(told.ledger, told.step, name), told.step, longest));
  const table = element("table", { class: "ledger" });
  for (const [place, ...its] of done.ledger) {
    table.append(element("tr", {},
      element("td", {}, swatch(place)),
      element("th", { scope: "row", text: name(place) }),
      element("td", { class: "figure", text: duration(its[0], longest) }),
      element("td", { class: "figure", text: duration(its[1], longest) }),
      element("td", { class: its[2] && its[1] < its[0] ? "gain" : "faint", text: said(its) }),
    ));
  }
  const plan = done.plan.map((one) => element("li", {}, element("b", { text: one.made ? "made " : "not made " }), `${one.fix}${one.where ? ` at ${one.where}` : ""}`, element("span", { class: "faint", text: ` · foretold to gain ${duration(one.gain)} a turn` })));
  const foretold = done.foretold && element("p", {}, `Foretold by what was made: ${transition(before, done.foretold[0])} (${range(done.foretold[1], done.foretold[2], before)}); it came to ${duration(after, before)}.`);
  const run = done.run && element("p", {}, `The whole run: ${transition(done.run[0], done.run[1])}${done.plan.some((one) => one.made) ? `, foretold ${duration(done.run[2], done.run[0])}` : ""}.`);
  const notes = done.notes.length ? element("ul", { class: "notes" }, ...done.notes.map((note) => element("li", { text: note }))) : null;
  return section("changed", "What changed", "", headline, element("div", { class: "bars" }, ...bars), table, plan.length ? element("ul", { class: "notes" }, ...plan) : null, foretold, run, notes);
}
