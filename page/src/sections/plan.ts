// What to do, in order, each fix with a switch that replays the turns with it.

import { element, section } from "../element";
import { term } from "../glossary";
import type { Fix, Header, Told } from "../run/run";
import { change, duration, range, transition } from "../words";
import type { Choice } from "../choice";

export function planSection(header: Header, told: Told, choice: Choice): HTMLElement | null {
  if (!told.plan.length) return null;
  const result = element("p", { class: "result", role: "status" });
  const list = element("ol", { class: "plan" });
  let step = told.step;
  for (const fix of told.plan) {
    list.append(entry(header, told, fix, step, choice));
    step = fix.predicted[0];
  }
  const turn = told.script ? "The script" : "A turn";
  choice.onFixes((view) => {
    const on = view.fixed.map((fix) => fix + 1);
    const known = on.length > 0 && on.every((number, place) => number === place + 1) ? told.plan[on.length - 1] : null;
    const among = known ? ` (${range(known.predicted[1], known.predicted[2], told.step)})` : "";
    result.textContent = on.length
      ? `With ${on.length > 1 ? "fixes" : "fix"} ${on.join(", ")}: ${turn.toLowerCase()} takes ${duration(view.step)}${among} instead of ${duration(told.step)}, ${change(told.step, view.step)}. The timeline below shows both.`
      : `Switch a fix on: the turns are replayed with it, alone or together with others.`;
  });
  const every = (on: boolean) => () => choice.fixes(on ? told.plan.filter((fix) => fix.replayed).map((fix) => fix.number) : []);
  const buttons = element("div", { class: "buttons" });
  if (told.plan.filter((fix) => fix.replayed).length > 1) {
    buttons.append(element("button", { type: "button", text: "All on", on: { click: every(true) } }), element("button", { type: "button", text: "All off", on: { click: every(false) } }));
  }
  const made = section("plan", "What to do", "", list, element("div", { class: "after" }, result, buttons));
  const noise = told.noise ? element("p", { class: "faint" }, "Gains below ", element("b", { text: duration(told.noise) }), " are ", term("noise"), ".") : null;
  if (noise) made.append(noise);
  return made;
}

function entry(header: Header, told: Told, fix: Fix, before: number, choice: Choice): HTMLElement {
  const id = `fix-${fix.number}`;
  const flip = element("input", {
    type: "checkbox",
    role: "switch",
    id,
    disabled: !fix.replayed,
    on: { change: () => choice.toggle(fix.number) },
  });
  choice.onFixes((view) => (flip.checked = view.fixed.includes(fix.number)));
  const [place, ...more] = fix.where;
  const where = place
    ? element("button", { class: "place", type: "button", text: place.text, on: { click: () => choice.line(place.file, place.line) } })
    : null;
  const others = more.length ? element("span", { class: "faint", text: ` and ${more.length} more` }) : null;
  const changed = Math.abs(before - fix.predicted[0]) > 0;
  const gain = changed
    ? element("span", { class: "gain" }, transition(before, fix.predicted[0]), " a turn ", element("span", { class: "faint", text: `(${range(fix.predicted[1], fix.predicted[2], told.step)})` }))
    : null;
  const run = header.run && fix.run ? element("span", { class: "gain", text: `the run ${transition(header.run.time, Math.max(0, header.run.time - fix.run))}` }) : null;
  const notes: string[] = [];
  if (!fix.replayed) notes.push("Known from the whole run; within one turn there is nothing to replay.");
  if (fix.needs.length) notes.push(`${fix.alone <= told.noise ? "Alone it gains nothing; it" : "It"} goes together with ${fix.needs.join(" and ")}.`);
  if (fix.instead.length) notes.push(`Or ${fix.instead[0]} instead: either of the two.`);
  return element(
    "li",
    {},
    element(
      "div",
      { class: "entry" },
      element("label", { class: "flip", for: id }, flip, element("span", { class: "knob", "aria-hidden": "true" }), element("span", { class: "number", text: String(fix.number + 1) })),
      element("div", { class: "what" },
        element("p", { class: "name" }, element("label", { for: id, text: fix.fix }), where ? " at " : "", where, others),
        element("p", { class: "gains" }, gain, gain && run ? " · " : "", run),
        fix.advice ? element("p", { text: fix.advice }) : null,
        fix.code ? element("pre", {}, element("code", { text: fix.code })) : null,
        ...notes.map((note) => element("p", { class: "faint", text: note })),
      ),
    ),
  );
}
