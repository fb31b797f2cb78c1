// Runs the script of a report's page over a small document, and prints what the elements that were asked for hold.
// node page_in_node.js PAGE ID...
"use strict";
const fs = require("fs");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, text: "", hidden: false, style: {} });
    Object.assign(this, { clientWidth: 600, clientHeight: 300, offsetTop: 0, offsetWidth: 0, offsetHeight: 0, scrollTop: 0 });
    const named = () => (this.attributes.class ?? "").split(" ").filter(Boolean), set = names => this.attributes.class = names.join(" ");
    this.classList = {
      add: name => set([...named().filter(each => each !== name), name]),
      remove: name => set(named().filter(each => each !== name)),
      contains: name => named().includes(name),
    };
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; this.text = ""; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  get textContent() { return this.text + this.children.map(child => child.textContent ?? child).join(""); }
  set textContent(text) { this.text = text; this.children = []; }
  all() { return this.children.flatMap(child => child instanceof Element ? [child, ...child.all()] : []); }
  querySelectorAll(selector) {  // of ".name" and ".name.name" with commas between, as in the page
    const wanted = selector.split(",").map(each => each.trim().split(" ").at(-1).split(".").filter(Boolean));
    return this.all().filter(element => wanted.some(names => names.every(name => element.classList.contains(name))));
  }
}

const [, , path, ...ids] = process.argv, scripts = [...fs.readFileSync(path, "utf8").matchAll(/<script[^>]*>([^]*?)<\/script>/g)];
const elements = { data: new Element("script") };
elements.data.textContent = scripts[0][1];
const document = {
  getElementById: id => elements[id] ??= new Element("div"),
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelectorAll: selector => Object.values(elements).flatMap(element => element.querySelectorAll(selector)),
};
new Function("document", "addEventListener", "innerWidth", "innerHeight", scripts[1][1])(document, () => {}, 800, 600);
const shown = element => ({ tag: element.tag, ...element.attributes, text: element.textContent });
console.log(JSON.stringify(Object.fromEntries(ids.map(id => [id, { text: elements[id].textContent, inside: elements[id].all().map(shown) }]))));
