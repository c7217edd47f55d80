"""The style sheet of the report."""

from __future__ import annotations

CSS = """
:root { --ink: #1f2933; --muted: #66727f; --line: #e1e6ea; --paper: #ffffff; --ground: #f5f7f9;
  --blue: #2563c9; --pass: #17734f; --fail: #b8344c; --warn: #8a5a00; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 72px; }
h1 { font-size: 27px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 42px 0 12px; }
h3 { font-size: 14px; margin: 0 0 6px; font-weight: 600; }
p.note { color: var(--muted); margin: 4px 0 12px; }
.charts .note, .tile .label, .tile .from, .example .step, .part, th, footer {
  color: var(--muted); font-size: 13px; }
pre { margin: 0; padding: 12px 14px; max-height: 360px; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--ground); border-radius: 6px;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.card { padding: 16px 18px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin-top: 22px; }
.tile { padding: 14px 16px; }
.charts .note { margin: 0 0 8px; }
.tile .value { font-size: 25px; font-weight: 600; line-height: 1.3; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(350px, 1fr)); gap: 14px; }
.card.all { margin-top: 14px; }
.card img { display: block; width: 100%; height: auto; }
p.facts { margin: 6px 0 0; color: var(--muted); overflow-wrap: anywhere; }
p.facts span { font-weight: 500; color: var(--ink); }
p.left-out { margin: 10px 0 0; color: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 500; }
th, td { text-align: right; padding: 8px 12px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
.example { margin-bottom: 14px; }
.example header { display: flex; flex-wrap: wrap; gap: 8px; align-items: center;
  margin-bottom: 10px; }
.example .step { margin-right: auto; }
.chip { border-radius: 999px; padding: 2px 11px; font-size: 13px; background: var(--ground); }
.example.pass { border-left: 4px solid var(--pass); }
.example.fail { border-left: 4px solid var(--fail); }
.example.part-pass { border-left: 4px solid #c58a1c; }
.chip.pass, .added { color: var(--pass); background: #e3f4ec; }
.chip.fail, .removed { color: var(--fail); background: #fbe7ea; }
.chip.part-pass { color: var(--warn); background: #fbf1dc; }
.place { color: var(--muted); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 12px; }
.pair > div { min-width: 0; }
.part { margin-bottom: 4px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.key:not(:first-of-type) { margin-left: 14px; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 12px; max-height: none; }
footer { margin-top: 42px; }
"""
