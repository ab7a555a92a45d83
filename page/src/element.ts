// Elements, made without markup: what a program calls itself is text here and nothing else.

type Child = Node | string | null | undefined | false;
type Options = { class?: string; text?: string; on?: Record<string, (event: any) => void>; look?: Record<string, string> } & Record<string, unknown>;

export function element<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  options: Options = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const made = document.createElement(name);
  const { class: classes, text, on, look, ...attributes } = options;
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  for (const [event, handler] of Object.entries(on ?? {})) made.addEventListener(event, handler);
  for (const [property, value] of Object.entries(look ?? {})) made.style.setProperty(property, value);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false && value !== null) made.setAttribute(attribute, value === true ? "" : String(value));
  }
  made.append(...children.filter((child): child is Node | string => Boolean(child)));
  return made;
}

/** A part of the page that is closed until somebody asks for it, and its main fact. */
export function folded(id: string, heading: string, fact: string, ...children: Child[]): HTMLElement {
  const summary = element("summary", {}, element("h2", { text: heading, id: `${id}-heading` }), element("span", { class: "faint", text: fact }));
  return element("section", { id, "aria-labelledby": `${id}-heading` }, element("details", {}, summary, ...children));
}

/** A part of the page with its heading. */
export function section(id: string, heading: string, about: string, ...children: Child[]): HTMLElement {
  const title = element("h2", { text: heading, id: `${id}-heading` });
  const lead = about ? element("p", { class: "lead", text: about }) : null;
  return element("section", { id, "aria-labelledby": `${id}-heading` }, element("header", {}, title, lead), ...children);
}
