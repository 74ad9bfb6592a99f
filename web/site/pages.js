/** The pages of the site, in navigation order. Navigation, cards, titles and link previews are generated from this list. */
export const PAGES = [
  {
    folder: "playground",
    name: "Playground",
    line: "Watch a small network learn a decision boundary, neuron by neuron.",
    description: "A neural network learns to classify points in the plane: change layers, activation, noise and learning rate live in this tab.",
  },
  {
    folder: "draw",
    name: "Draw",
    line: "A network learns handwritten digits. Draw one, then teach it symbols of your own.",
    description: "A digit classifier trains in this tab in seconds: see the weights of its first layer and its mistakes, and add classes by drawing them.",
  },
  {
    folder: "teach",
    name: "Teach",
    line: "Train a classifier with your camera, microphone or images.",
    description: "Train a classifier for your own classes with camera, microphone or images in this tab, and download the .onnx file.",
  },
  {
    folder: "write",
    name: "Write",
    line: "Paste a text and train a small language model on it.",
    description: "Paste a text and train a small language model in this tab, from noise to words, with samples during training.",
  },
  {
    folder: "model",
    name: "Your model",
    line: "Drop a table, an .onnx file or artifacts, and train your own model.",
    description: "Train a model on a CSV, NPZ or JSONL file in this tab: an MLP, or your own .onnx file with loss and optimizer.",
  },
  {
    folder: "style",
    name: "Style",
    line: "Run a trained style-transfer network on your image.",
    description: "A style-transfer network stylizes your image in this tab. The image is not uploaded.",
  },
];

/** The start page. */
export const START = {
  folder: "",
  name: "Train neural networks in your browser",
  description: "Five demos train neural networks in this tab on stock ONNX Runtime; one runs a trained network. Nothing to install; your data stays on your device.",
};
