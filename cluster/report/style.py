"""The style sheet of the report: light and dark scheme, one column on a phone.

The variables --ink, --grid, --paper, --soft and --s1 to --s6 are the colors of the charts (cluster/plots/svg.py).
"""

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f7f8fa; --ink: #1d2228; --soft: #5b6570; --grid: #d9dde3;
  --shade: rgb(0 0 0 / .24);
  --s1: #1f6fb4; --s2: #cf4257; --s3: #2a9d5c; --s4: #d98200; --s5: #7b4fa3; --s6: #6b7280; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1c2026; --ink: #e7eaee; --soft: #a3adb8; --grid: #353b44;
    --shade: rgb(255 255 255 / .26);
    --s1: #63aef0; --s2: #ff7d8d; --s3: #56cf8b; --s4: #f3b244; --s5: #c198f0; --s6: #8d97a3; } }
@media print { .card, .tile { break-inside: avoid; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1280px; margin: 0 auto; padding: 20px 20px 48px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .7rem; }
h3, figcaption, caption { font-size: .95rem; font-weight: 600; margin: 0 0 .5rem; text-align: left; }
p { margin: .3rem 0 .6rem; }
.card p { font-size: .86rem; }
h1 + .card { margin-top: .8rem; }
.soft { color: var(--soft); }
.state { border: 1px solid currentColor; border-radius: 99px; padding: .1em .7em; font-size: .85rem; font-weight: 600;
  white-space: nowrap; vertical-align: middle; color: var(--s1); }
.done { color: var(--s3); } .failed { color: var(--s2); } .stopped { color: var(--s4); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(142px, 1fr)); gap: 10px; margin: 1rem 0 0; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 9px 12px; min-width: 0; }
.two { grid-column: span 2; }
.tile b { display: block; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.tile span { color: var(--soft); font-size: .82rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 14px; }
.row { display: flex; flex-wrap: wrap; gap: 14px; }
.row > * { flex: 1 1 360px; } .row > .ample { flex: 3 1 560px; } .row > .wide { flex: 1 0 100%; }
.row > .card:not(.wide) svg { max-height: 320px; }
.card { margin: 0; background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 12px 14px;
  min-width: 0; }
.wide { grid-column: 1 / -1; }
.card svg { display: block; width: 100%; height: auto; margin: 0 auto; max-height: 640px; }
.card svg * { stroke-linejoin: round; stroke-linecap: butt; }
.card svg text { font-family: inherit; white-space: pre; }
.narrow { display: none; }
.keys { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .45rem 0 0; padding: 0; list-style: none;
  font-size: .82rem; color: var(--soft); }
.keys i { display: inline-block; width: 20px; height: 0; border-top: 2.5px solid var(--key); margin-right: .4em;
  vertical-align: middle; }
.keys i.dashed { border-top-style: dashed; } .keys i.dotted { border-top-style: dotted; }
.keys i.box { width: 11px; height: 11px; border: 0; border-radius: 2px; background: var(--key); vertical-align: -1px; }
.keys i.cross { width: auto; height: auto; border: 0; color: var(--key); font-style: normal; font-weight: 700; }
.scroll { overflow-x: auto; max-width: 100%; background:
  linear-gradient(to right, var(--card) 40%, transparent) left / 44px 100% local,
  linear-gradient(to left, var(--card) 40%, transparent) right / 44px 100% local,
  linear-gradient(to right, var(--shade), transparent) left / 18px 100% scroll,
  linear-gradient(to left, var(--shade), transparent) right / 18px 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
.number { text-align: right; }
.number, .short, caption { white-space: nowrap; }
.long { min-width: 15em; overflow-wrap: anywhere; }
details summary { cursor: pointer; font-weight: 600; font-size: .95rem; }
details[open] summary { margin-bottom: .5rem; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px; align-items: end; }
.image { margin: 0; min-width: 0; font-size: .82rem; }
.image div { position: relative; width: fit-content; max-width: 100%; }
.image img { display: block; max-width: 100%; min-width: 96px; height: auto; border-radius: 3px; }
.image svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.image rect { fill: none; vector-effect: non-scaling-stroke; stroke-width: 2px; }
.image .under { stroke: #000; stroke-width: 4px; opacity: .55; }
.image .rectangle { stroke: #ffd23f; } .image .square { stroke: #fff; stroke-dasharray: 5 4; }
@media (max-width: 1180px) { .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 700px) {
  main { padding: 14px 10px 32px; }
  .cards { grid-template-columns: minmax(0, 1fr); }
  .row > *, .row > .ample { flex: 1 1 100%; }
  .long { min-width: 11em; }
  .card { padding: 10px; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); gap: 8px; }
  .tile { padding: 7px 9px; } .tile b { font-size: 1.1rem; }
  .images { grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); }
  .broad { display: none !important; } .narrow { display: block !important; }
}
"""
