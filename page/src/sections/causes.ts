// Why the GPU waits, in words: each cause with its lines, what it costs and what to write.

import type { Choice } from "../choice";
import { element, section } from "../element";
import type { Header, Place, Reason, Told } from "../run/run";
import { change, duration, range, share, times, transition } from "../words";
import { swatch } from "./ledger";

export function placeButton(place: Place, choice: Choice | null): HTMLElement {
  if (!place.file || !choice) return element("span", { class: "place", text: place.text });
  return element("button", { type: "button", class: "place", text: place.text, on: { click: () => choice.line(place.file, place.line) } });
}

export function causesSection(header: Header, told: Told, choice: Choice | null): HTMLElement {
  const cards = told.reasons.map((reason, index) => card(header, told, reason, index + 1, choice));
  const nothing = cards.length ? null : element("p", { text: "Nothing that is known would gain more than the noise." });
  return section("causes", "Why the GPU waits", "", nothing, ...cards);
}

function card(header: Header, told: Told, reason: Reason, number: number, choice: Choice | null): HTMLElement {
  const look = header.looks[reason.cause] ?? { name: reason.cause, sentence: reason.cause };
  const [step, low, high] = reason.predicted;
  const show = choice ? element("button", { type: "button", text: "Show the longest", on: { click: () => choice.cause(reason.cause) } }) : null;
  const same = told.reasons.findIndex((one) => one.cause === reason.same);
  return element("article", { class: "card" },
    element("h3", {}, swatch(reason.cause), `${number}  ${look.sentence}`, element("span", { class: "faint", text: ` · ${reason.cause}` })),
    element("p", {}, element("span", { class: "gain", text: `${transition(told.step, step)}, ${change(told.step, step)}` }), element("span", { class: "faint", text: ` (${range(low, high, told.step)}) · the GPU waits ${duration(reason.wait, told.step)} a turn for it, ${share(reason.wait, told.step)} · ${times(reason.count)}` })),
    same >= 0 ? element("p", { text: `The same idle time as ${same + 1}: to fix one of them may be enough.` }) : null,
    element("ul", { class: "sites" }, ...reason.sites.slice(0, 5).map((site) =>
      element("li", {}, placeButton(site.where, choice), site.wait > 0 ? element("span", { class: "faint", text: ` ${duration(site.wait)}` }) : null, site.where.source ? element("code", { text: site.where.source }) : null),
    )),
    element("p", { text: reason.what }),
    reason.advice ? element("p", { text: reason.advice }) : null,
    reason.code ? element("pre", {}, element("code", { text: reason.code })) : null,
    show,
  );
}

/** What costs nothing here, what one should know, and the run's own figures. */
export function notesSection(header: Header, told: Told, choice: Choice | null): HTMLElement | null {
  const items = [
    ...header.asides.map(([label, said]) => element("li", {}, label ? element("span", { class: "faint", text: `${label} ` }) : null, said)),
    ...told.harmless.slice(0, 8).map((one) => element("li", {}, element("span", { class: "faint", text: "costs nothing " }), `${header.looks[one.cause]?.name ?? one.cause}, ${times(one.count)}, `, placeButton(one.where, choice), `: ${one.why}`)),
    ...told.notes.map((note) => element("li", {}, element("span", { class: "faint", text: "note " }), note)),
  ];
  return items.length ? section("notes", "What else there is to know", "", element("ul", { class: "notes" }, ...items)) : null;
}
