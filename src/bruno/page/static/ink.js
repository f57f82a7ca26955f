// Pictures of the model's size, enlarged for the screen.

const ENLARGED = 6; // times
const EDGE = [0.25, 0.65]; // levels of ink that become paper and full ink: sharper than the enlarged pixels

// Paint pixels (0 to 255) on a canvas, in its CSS colour; repainted when the colours of the page change.
export function paint(canvas, pixels, size) {
  canvas.pixels = pixels;
  const small = new OffscreenCanvas(size, size);
  const image = new ImageData(size, size);
  pixels.forEach((value, i) => (image.data[4 * i + 3] = value));
  small.getContext("2d").putImageData(image, 0, 0);
  const side = (canvas.width = canvas.height = ENLARGED * size);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, side, side);
  const large = context.getImageData(0, 0, side, side);
  const [low, high] = EDGE.map((level) => 255 * level);
  for (let i = 3; i < large.data.length; i += 4) large.data[i] = (255 * (large.data[i] - low)) / (high - low);
  context.putImageData(large, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = getComputedStyle(canvas).color;
  context.fillRect(0, 0, side, side);
}

export function showImages(grid, images, size) {
  while (grid.children.length > images.length) grid.lastChild.remove();
  while (grid.children.length < images.length) grid.append(document.createElement("canvas"));
  images.forEach((pixels, i) => paint(grid.children[i], pixels, size));
}

matchMedia("(prefers-color-scheme: dark)").onchange = () => {
  for (const canvas of document.querySelectorAll("canvas")) {
    if (canvas.pixels) paint(canvas, canvas.pixels, Math.sqrt(canvas.pixels.length));
    canvas.dispatchEvent(new Event("colours"));
  }
};
