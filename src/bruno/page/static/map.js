// Two latent dimensions: the density of the next drawing as a cloud, and drawings at their places.

import { logShape } from "./evidence.js";
import { paint } from "./ink.js";

const SIDE = 880; // pixels of the canvas
const CELLS = 110; // of the cloud, along each axis
const REACH = 1.7; // scales of the prior, from the middle to the edge
const [DOT, THUMBNAIL] = [9, 96]; // pixels

// prior, now: location, scale and degrees of freedom, for each dimension
export function showMap(canvas, prior, now, dots, landmarks) {
  canvas.width = canvas.height = SIDE;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const at = (place) => place.map((value, axis) => toPixels(value, prior[axis]));
  context.drawImage(cloud(prior, now, style.outlineColor), 0, 0, SIDE, SIDE);
  context.strokeStyle = context.fillStyle = style.color;
  context.lineWidth = 3;
  const thumbnail = document.createElement("canvas");
  thumbnail.hidden = true;
  canvas.after(thumbnail); // takes its colour from the page
  context.globalAlpha = 0.45;
  for (const { place, image } of landmarks) {
    paint(thumbnail, image, Math.sqrt(image.length));
    const [x, y] = at(place);
    context.drawImage(thumbnail, x - THUMBNAIL / 2, y - THUMBNAIL / 2, THUMBNAIL, THUMBNAIL);
  }
  thumbnail.remove();
  for (const { place, isSeen } of dots) {
    context.globalAlpha = isSeen ? 1 : 0.35;
    context.beginPath();
    context.arc(...at(place), DOT, 0, 2 * Math.PI);
    isSeen ? context.fill() : context.stroke();
  }
  context.globalAlpha = 1;
}

function toPixels(value, [location, scale]) {
  return SIDE * (0.5 + (value - location) / (2 * REACH * scale));
}

// The density, relative to its highest value, as the opacity of one colour.
function cloud(prior, now, colour) {
  const logs = now.map((predictive, axis) => {
    const [location, scale] = prior[axis];
    const grid = Array.from({ length: CELLS }, (_, i) => location + REACH * scale * ((2 * (i + 0.5)) / CELLS - 1));
    return grid.map((x) => logShape(x, ...predictive));
  });
  const canvas = new OffscreenCanvas(CELLS, CELLS);
  const context = canvas.getContext("2d");
  const image = new ImageData(CELLS, CELLS);
  for (let row = 0; row < CELLS; row++)
    for (let column = 0; column < CELLS; column++)
      image.data[4 * (row * CELLS + column) + 3] = 170 * Math.exp(logs[0][column] + logs[1][row]);
  context.putImageData(image, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = colour;
  context.fillRect(0, 0, CELLS, CELLS);
  return canvas;
}
