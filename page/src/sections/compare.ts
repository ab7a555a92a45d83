// Two runs of one program: what changed, and what was predicted.

import { element, section } from "../element";
import type { Changed, Compared, Header } from "../run/run";
import { change, duration, leading, range, transition } from "../words";
import { bar, barRow, swatch } from "./ledger";

const changeOf = ([before, after, significant]: Changed): string => (!significant ? "within noise" : before ? change(before, after) : "new");

export function compareSection(headers: Header[], done: Compared): HTMLElement {
  const [before, after, significant] = done.step;
  const names = headers[0].looks;
  const name = (place: string) => names[place]?.name ?? place;
  const headline = element("p", { class: "big" },
    element("b", { text: transition(before, after) }), significant ? ` per iteration: ${change(before, after)}.` : " per iteration: the same within noise.");
  const longest = Math.max(before, after);
  const bars = headers.map(({ analyses: [analysis] }, at) => barRow(at ? "after" : "before", bar(analysis.ledger, analysis.step, name), analysis.step, longest));
  const table = element("table", { class: "ledger" });
  for (const [place, ...its] of done.ledger) {
    table.append(element("tr", {},
      element("td", {}, swatch(place)),
      element("th", { scope: "row", text: name(place) }),
      element("td", { class: "figure", text: duration(its[0], longest) }),
      element("td", { class: "figure", text: duration(its[1], longest) }),
      element("td", { class: its[2] && its[1] < its[0] ? "gain" : "faint", text: changeOf(its) }),
    ));
  }
  const plan = done.plan.map((one) => element("li", {}, element("b", { text: one.made ? "fixed " : "not fixed " }), `${one.fix}${one.where && leading(one.where) + one.where}`, element("span", { class: "faint", text: ` · predicted to save ${duration(one.saves)} per iteration` })));
  const predicted = done.predicted && element("p", {}, `Predicted: ${transition(before, done.predicted[0])} (${range(done.predicted[1], done.predicted[2], before)}). Measured: ${duration(after, before)}.`);
  const run = done.run && element("p", {}, `The whole run: ${transition(done.run[0], done.run[1])}${done.plan.some((one) => one.made) ? `, predicted ${duration(done.run[2], done.run[0])}` : ""}.`);
  const notes = done.notes.length ? element("ul", { class: "notes" }, ...done.notes.map((note) => element("li", { text: note }))) : null;
  return section("changed", "What changed", "", headline, element("div", { class: "bars" }, ...bars), table, plan.length ? element("ul", { class: "notes" }, ...plan) : null, predicted, run, notes);
}
