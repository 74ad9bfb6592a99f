/** Stand-ins of our own for the packages that draw the pages of the web programs: plain elements. */
import { createElement } from "react";

const element = (tag) => ({ children, onClick, disabled, value, onChange, label, type }) =>
  createElement(tag, { onClick, disabled, value, onChange, type, "aria-label": label }, tag === "input" ? undefined : children);

export const Button = element("button");
export const [Container, Grid, TableContainer, ThemeProvider] = Array(4).fill(element("div"));
export const Link = element("a");
export const [TextField, Switch] = Array(2).fill(element("input"));
export const FormControlLabel = ({ control }) => control;
export const [Table, TableHead, TableBody, TableRow, TableCell] = ["table", "thead", "tbody", "tr", "td"].map(element);

/** A plot: the last value of its first line, as text. */
export default function Plot({ data }) {
  const y = data[0].y;
  return createElement("output", {}, y.length ? `${y.length} values, first ${y[0]}, last ${y.at(-1)}` : "no values");
}
