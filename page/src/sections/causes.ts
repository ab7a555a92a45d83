// Why the GPU is idle: each cause with its lines, the idle time, and what to write.

import type { Choice } from "../choice";
import { element, section } from "../element";
import type { Analysis, Header, Place, Reason } from "../run/run";
import { duration, range, share, times, transition } from "../words";
import { swatch } from "./ledger";

const MOST_SITES = 5;

export function placeButton(place: Place, choice: Choice | null): HTMLElement {
  if (!place.file || !choice) return element("span", { class: "place", text: place.text });
  return element("button", { type: "button", class: "place", text: place.text, on: { click: () => choice.line(place.file, place.line) } });
}

export function causesSection(header: Header, analysis: Analysis, choice: Choice | null): HTMLElement | null {
  if (!analysis.reasons.length) return null;
  return section("causes", "Why the GPU is idle", "", ...analysis.reasons.map((reason, index) => card(header, analysis, reason, index + 1, choice)));
}

function card(header: Header, analysis: Analysis, reason: Reason, number: number, choice: Choice | null): HTMLElement {
  const look = header.looks[reason.cause] ?? { name: reason.cause, sentence: reason.cause };
  const [step, low, high] = reason.predicted;
  const show = choice ? element("button", { type: "button", text: "Show the longest", on: { click: () => choice.cause(reason.cause) } }) : null;
  const same = analysis.reasons.findIndex((one) => one.cause === reason.same);
  const more = reason.sites.length - MOST_SITES;
  return element("article", { class: "card" },
    element("h3", {}, swatch(reason.cause), `${number}  ${look.name}`),
    element("p", {}, element("span", { class: "gain", text: transition(analysis.step, step) }), element("span", { class: "faint", text: ` (${range(low, high, analysis.step)}) if fixed · the GPU is idle ${duration(reason.wait, analysis.step)} per iteration (${share(reason.wait, analysis.step)}) · ${times(reason.count)}` })),
    same >= 0 ? element("p", { text: `This is the same idle time as ${same + 1}. Fixing one of them may be enough.` }) : null,
    element("ul", { class: "sites" }, ...reason.sites.slice(0, MOST_SITES).map((site) =>
      element("li", {}, placeButton(site.where, choice), site.wait > 0 ? element("span", { class: "faint", text: ` ${duration(site.wait)}` }) : null, site.where.source ? element("code", { text: site.where.source }) : null),
    ), more > 0 ? element("li", { class: "faint", text: `${more} more` }) : null),
    element("p", { text: reason.what }),
    reason.advice ? element("p", { text: reason.advice }) : null,
    reason.code ? element("pre", {}, element("code", { text: reason.code })) : null,
    show,
  );
}

/** What costs nothing, and what else the reader should know. */
export function notesSection(analysis: Analysis): HTMLElement | null {
  if (!analysis.notes.length) return null;
  const items = analysis.notes.map(([label, sentence]) => element("li", {}, label ? element("span", { class: "faint", text: `${label} ` }) : null, sentence));
  return section("notes", "Notes", "", element("ul", { class: "notes" }, ...items));
}
