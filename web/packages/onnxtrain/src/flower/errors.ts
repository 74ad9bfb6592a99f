import { OnnxTrainError } from "../errors.js";

/** The federation cannot be reached, refuses this node, or speaks otherwise than Flower 1.40 to 1.42. */
export class FlowerError extends OnnxTrainError {
  override name = "FlowerError";
  /** Of the HTTP answer, if there was one. */
  readonly status: number;
  /** Flower's own number of the error, if it gave one. */
  readonly code: number;

  constructor(message: string, status = 0, code = 0) {
    super(message);
    this.status = status;
    this.code = code;
  }
}
