/** The pages of the site, in the order of the navigation; every list of them is made from this one. */
export const PAGES = [
  {
    folder: "playground",
    name: "Playground",
    line: "Watch a small net bend its boundary around points, neuron by neuron.",
    description: "A neural net learns to separate points in the plane while you watch: change layers, activation, noise and rate, live in this tab.",
  },
  {
    folder: "draw",
    name: "Draw",
    line: "A net learns handwritten digits. Draw one, then teach it signs of your own.",
    description: "A digit classifier learns in this tab in seconds: see what its first layer learned, where it is wrong, and add classes by drawing them.",
  },
  {
    folder: "teach",
    name: "Teach",
    line: "Your own classes from camera, microphone or pictures, learned on the spot.",
    description: "Teach a classifier your own classes from the camera, the microphone or pictures. It learns in this tab; take the .onnx file along.",
  },
  {
    folder: "write",
    name: "Write",
    line: "Paste a text; a small language model learns to write like it.",
    description: "Paste a text and watch a small language model learn it in this tab, from noise to words, with samples as it goes.",
  },
  {
    folder: "style",
    name: "Style",
    line: "Your picture, painted like a mosaic, by a net that runs here.",
    description: "A style-transfer net repaints your picture in this tab. The picture stays with you.",
  },
  {
    folder: "model",
    name: "Your model",
    line: "Drop a model that onnxtrain built and a table of data, and train it here.",
    description: "Drop artifacts that onnxtrain built and a CSV, NPZ or JSONL file, and train your own model in this tab.",
  },
];

/** The start page. */
export const START = {
  folder: "",
  name: "Neural nets that learn in your browser",
  description: "Six things to try: train neural nets in this tab, on stock ONNX Runtime. Nothing is installed, nothing leaves your device.",
};
