// A square to draw on, by mouse, pen, touch or keyboard.

import { paint, pixelsOf } from "./drawing.js";

const DETAIL = 240; // pixels of the canvas
const STEP = 0.04; // of the pad, for each press of an arrow key
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  // parent: the element to append to; size: pixels of a drawing; onChange: called after each stroke
  constructor(parent, { size, label, onChange }) {
    Object.assign(this, { size, onChange, onBegin() {}, strokes: [], given: null, cursor: null, isDown: false });
    this.root = document.createElement("figure");
    this.root.className = "pad";
    this.root.innerHTML = `
      <canvas tabindex="0" role="img"></canvas>
      <figcaption><b></b><button class="undo">Undo</button><button class="clear">Clear</button></figcaption>`;
    this.canvas = this.root.querySelector("canvas");
    this.root.querySelector("b").textContent = label.length === 1 ? label : ""; // only short names are shown
    this.canvas.setAttribute(
      "aria-label",
      `${label}. Arrow keys move, space lowers and lifts the pen, backspace undoes, delete clears.`,
    );
    this.root.querySelector(".undo").onclick = () => this.undo();
    this.root.querySelector(".clear").onclick = () => this.clear();
    this.canvas.onpointerdown = (event) => this.begin(event);
    this.canvas.onpointermove = (event) => this.isDown && this.extend(event);
    this.canvas.onpointerup = this.canvas.onpointercancel = () => this.isDown && this.end();
    this.canvas.onkeydown = (event) => this.press(event);
    this.canvas.onblur = () => this.lift();
    parent.append(this.root);
    this.show();
  }

  // The drawing as the model takes it; null if the pad is empty.
  get pixels() {
    return this.given ?? pixelsOf(this.strokes, this.size);
  }

  set(pixels) {
    this.given = pixels;
    this.strokes = [];
    this.show();
  }

  clear() {
    this.set(null);
    this.onChange();
  }

  undo() {
    if (this.given) return this.clear();
    this.strokes.pop();
    this.show();
    this.onChange();
  }

  begin(event) {
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture?.(event.pointerId);
    this.onBegin();
    this.given = null; // drawing on an example replaces it
    this.isDown = true;
    this.cursor = null;
    this.strokes.push([this.place(event)]);
    this.show();
  }

  extend(event) {
    const events = event.getCoalescedEvents?.() ?? [];
    for (const one of events.length ? events : [event]) this.strokes.at(-1).push(this.place(one));
    this.show();
  }

  end() {
    this.isDown = false;
    this.onChange();
  }

  press(event) {
    const { key } = event;
    if (!(key in ARROWS) && ![" ", "Backspace", "Delete"].includes(key)) return;
    event.preventDefault();
    if (key === "Backspace") this.undo();
    else if (key === "Delete") this.clear();
    else if (key === " ") this.penByKey ? this.lift() : this.lower();
    else this.move(ARROWS[key]);
    this.show();
  }

  lower() {
    this.onBegin();
    this.given = null;
    this.cursor ??= [0.5, 0.5];
    this.strokes.push([this.cursor]);
    this.penByKey = true;
  }

  lift() {
    if (!this.penByKey) return;
    this.penByKey = false;
    this.onChange();
  }

  move(direction) {
    const from = this.cursor ?? [0.5, 0.5];
    this.cursor = from.map((x, axis) => Math.min(1, Math.max(0, x + STEP * direction[axis])));
    if (this.penByKey) this.strokes.at(-1).push(this.cursor);
  }

  place({ clientX, clientY }) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    return [(clientX - left) / width, (clientY - top) / height].map((x) => Math.min(1, Math.max(0, x)));
  }

  show() {
    if (this.given) return paint(this.canvas, this.given, this.size);
    this.canvas.width = this.canvas.height = DETAIL;
    const context = this.canvas.getContext("2d");
    Object.assign(context, { lineWidth: DETAIL / 21, lineCap: "round", lineJoin: "round" });
    for (const stroke of this.strokes) {
      context.beginPath();
      stroke.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](x * DETAIL, y * DETAIL));
      if (stroke.length === 1) context.lineTo(stroke[0][0] * DETAIL, stroke[0][1] * DETAIL);
      context.stroke();
    }
    if (this.cursor) {
      context.fillStyle = "#e4572e";
      context.fillRect(this.cursor[0] * DETAIL - 6, this.cursor[1] * DETAIL - 6, 12, 12);
    }
  }
}
