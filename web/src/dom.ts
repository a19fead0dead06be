type Child = Node | string | null;

/** A new element. Attributes that are null are left out; what is no attribute is a child. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string | null> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The same for drawings. */
export function draw<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Record<string, string | number> = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.filter((child) => child !== null));
  return element;
}

function setAll(element: Element, attributes: Record<string, string | null>): void {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
}

/** An element that index.html has. */
export function byId<T extends HTMLElement>(id: string, type: new () => T): T {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new Error(`index.html has no ${type.name} #${id}`);
  return element;
}
