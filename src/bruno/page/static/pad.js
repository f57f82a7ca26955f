// A square to draw on, by mouse, pen, touch or keyboard. A drawing is a list of strokes, a stroke a list of points.

import { pixelsOf } from "./drawing.js";

const DETAIL = 480; // pixels of the canvas
const PEN = DETAIL / 25;
const STEP = 0.04; // of the pad, for each press of an arrow key
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const PAUSE = 450; // milliseconds after a stroke: more strokes may follow
const PACE = 12; // milliseconds for each point of an example that is drawn before the visitor's eyes

export class Pad {
  // parent: the element to append to; size: pixels of a drawing; hint: shown where nothing is drawn;
  // onChange: called after the last of several strokes, and at once when they are taken back
  constructor(parent, { size, label, hint = "", onChange }) {
    Object.assign(this, { size, onChange, onBegin() {}, strokes: [], past: [], cursor: null, isDown: false });
    this.isExample = false;
    this.root = document.createElement("figure");
    this.root.className = "pad";
    this.root.innerHTML = `
      <div class="paper">
        <canvas tabindex="0" role="img"></canvas><span class="hint"></span>
        <button class="undo" aria-label="Undo" title="Undo">↶</button>
        <button class="clear" aria-label="Clear" title="Clear">×</button>
      </div>
      <figcaption></figcaption>`;
    this.canvas = this.root.querySelector("canvas");
    this.caption = this.root.querySelector("figcaption");
    this.root.querySelector(".hint").textContent = hint;
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
    this.canvas.addEventListener("colours", () => this.show());
    parent.append(this.root);
    this.changed();
  }

  // Show one of the page's own drawings, or nothing; the next stroke replaces it.
  set(strokes) {
    Object.assign(this, { strokes: strokes ?? [], past: [], isExample: Boolean(strokes), cursor: null });
    this.changed();
  }

  // The same, stroke by stroke before the visitor's eyes; resolves when it is drawn.
  async trace(strokes) {
    this.set(strokes);
    const last = strokes.flat().length;
    for (let shown = 1; shown < last && this.strokes === strokes; shown += 2) {
      this.show(shown);
      await new Promise((resolve) => setTimeout(resolve, 2 * PACE));
    }
    this.show();
  }

  clear() {
    if (!this.strokes.length) return;
    this.remember();
    Object.assign(this, { strokes: [], isExample: false });
    this.changed();
    this.tell(0);
  }

  // Take back the last change: a stroke, or all that was cleared or replaced.
  undo() {
    const before = this.past.pop();
    if (!before) return;
    Object.assign(this, before);
    this.changed();
    this.tell(0);
  }

  remember() {
    this.past.push({ strokes: [...this.strokes], isExample: this.isExample });
  }

  // Tell the panel of a change, unless another one follows first.
  tell(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(this.onChange, milliseconds);
  }

  // A new stroke from a point.
  start(point) {
    clearTimeout(this.timer);
    this.onBegin();
    this.remember();
    if (this.isExample) Object.assign(this, { strokes: [], isExample: false });
    this.strokes = [...this.strokes, [point]];
  }

  begin(event) {
    if (!event.isPrimary || event.button > 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture?.(event.pointerId);
    this.isDown = true;
    this.cursor = null;
    this.start(this.place(event));
    this.show();
  }

  extend(event) {
    const events = event.getCoalescedEvents?.() ?? [];
    for (const one of events.length ? events : [event]) this.strokes.at(-1).push(this.place(one));
    this.show();
  }

  end() {
    this.isDown = false;
    this.changed();
    this.tell(PAUSE);
  }

  press(event) {
    const { key } = event;
    const isUndo = key === "Backspace" || (key === "z" && (event.ctrlKey || event.metaKey));
    if (!isUndo && !(key in ARROWS) && ![" ", "Delete"].includes(key)) return;
    event.preventDefault();
    if (isUndo) this.undo();
    else if (key === "Delete") this.clear();
    else if (key === " ") this.penByKey ? this.lift() : this.lower();
    else this.move(ARROWS[key]);
    this.show();
  }

  lower() {
    this.cursor ??= [0.5, 0.5];
    this.start(this.cursor);
    this.penByKey = true;
  }

  lift() {
    if (!this.penByKey) return;
    this.penByKey = false;
    this.changed();
    this.tell(PAUSE);
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

  // The drawing as the model takes it, null if the pad is empty; made once for each change.
  changed() {
    this.pixels = pixelsOf(this.strokes, this.size);
    this.show();
  }

  // Draw the strokes, or their first `count` points.
  show(count = Infinity) {
    const { strokes, canvas } = this;
    this.root.classList.toggle("empty", !strokes.length);
    this.root.classList.toggle("changed", this.past.length > 0);
    canvas.width = canvas.height = DETAIL;
    const context = canvas.getContext("2d");
    Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round" });
    context.strokeStyle = getComputedStyle(canvas).color;
    let left = count;
    for (const stroke of strokes) {
      const points = stroke.slice(0, Math.max(0, left));
      left -= stroke.length;
      context.beginPath();
      smoothly(context, points.map(([x, y]) => [x * DETAIL, y * DETAIL]));
      context.stroke();
    }
    if (this.cursor) {
      context.fillStyle = getComputedStyle(canvas).outlineColor;
      context.fillRect(this.cursor[0] * DETAIL - 6, this.cursor[1] * DETAIL - 6, 12, 12);
    }
  }
}

// A path whose corners are rounded: curves between the middles of its lines.
function smoothly(context, points) {
  points.forEach(([x, y], i) => {
    if (i === 0) return context.moveTo(x, y);
    const [before, next] = [points[i - 1], points[i + 1]];
    const end = next ? [(x + next[0]) / 2, (y + next[1]) / 2] : [x, y];
    if (i === 1) context.lineTo((before[0] + x) / 2, (before[1] + y) / 2);
    context.quadraticCurveTo(x, y, ...end);
  });
  if (points.length === 1) context.lineTo(...points[0]);
}
