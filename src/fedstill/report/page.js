// Draws the charts of the page from the JSON beside each of them. A static picture stays where a chart fails.
(function () {
  "use strict";
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var themes = JSON.parse(document.getElementById("themes").textContent);
  function look() {
    var config = JSON.parse(JSON.stringify(dark.matches ? themes.dark : themes.light));
    config.axis.labelLimit = window.innerWidth < 560 ? 90 : 180;
    config.title.limit = window.innerWidth - 60;
    return config;
  }
  function recolour(node) { // for a dark page; colours stand in ranges and marks, names in data, domains and values
    if (Array.isArray(node)) return node.map(recolour);
    if (node && typeof node === "object") {
      Object.keys(node).forEach(function (key) { 
        if (["data", "domain", "values"].indexOf(key) < 0) node[key] = recolour(node[key]);
      });
      return node;
    }
    return Object.prototype.hasOwnProperty.call(themes.onDark, node) ? themes.onDark[node] : node;
  }
  function draw(figure) {
    var place = figure.querySelector(".live");
    var spec = JSON.parse(figure.querySelector("script").textContent);
    if (dark.matches) recolour(spec);
    var boxes = Array.prototype.slice.call(figure.querySelectorAll("input"));
    var config = look();
    if (boxes.length) spec.layer.forEach(function (layer) { // the boxes are the legend
      ["color", "strokeDash"].forEach(function (channel) { if (layer.encoding[channel]) layer.encoding[channel].legend = null; });
    });
    if (spec.data) spec.data.name = "rows"; // so that a live page can replace them
    spec.width = "container";
    spec.autosize = { type: "fit-x", contains: "padding" };
    figure.classList.add("js"); // shown first, because a hidden box has no width
    return vegaEmbed(place, spec, {
      ast: true, renderer: "svg", mode: "vega-lite", config: config, tooltip: { theme: dark.matches ? "dark" : "light" },
      actions: { export: true, source: false, compiled: false, editor: false }
    }).then(function (made) {
      place.querySelectorAll("svg").forEach(function (svg) { svg.setAttribute("aria-hidden", "true"); });
      function choose() {
        made.view.signal("shown", boxes.filter(function (box) { return box.checked; }).map(function (box) { return +box.value; })).runAsync();
      }
      boxes.forEach(function (box) { box.onchange = choose; });
      if (boxes.some(function (box) { return !box.checked; })) choose();
      figure.dataset.drawn = "yes";
      return made;
    }).catch(function (error) {
      figure.classList.remove("js");
      figure.dataset.drawn = "no";
      console.error(error);
    });
  }
  function draw_again(figure) {
    if (drawn.has(figure)) drawn.get(figure).finalize();
    drawn.delete(figure);
    return draw(figure).then(function (made) { if (made) drawn.set(figure, made); return made; });
  }
  var drawn = new Map(); // figure -> its view
  function all() {
    return Promise.all(Array.prototype.map.call(document.querySelectorAll("figure"), draw_again)).then(function () {
      document.body.dataset.ready = "yes";
    });
  }
  all();
  dark.addEventListener("change", all);
  window.fedstillPage = { draw: draw_again, drawn: drawn };
})();
