// The live page: sections arrive as events and take the place of older ones. Lines that a reader has switched off, a
// zoomed chart, the focus and the scrolled tables stay as they are.
(function () {
  "use strict";
  var page = window.fedstillPage;
  var SILENCE = 30000; // milliseconds without a word from the server, which sends one every ten seconds
  var AGAIN = 2000; // milliseconds before another try
  var main = document.querySelector("main");
  var says = document.getElementById("connection");
  var bar = document.querySelector("progress");
  var arrived = {}; // name of a section -> its HTML
  var off = {}; // place of a chart -> names of the lines that are switched off
  var order = [];
  var source = null, heard = 0, again = 0;

  // --- charts: only those near the window are drawn, one after another

  var waiting = new Set();
  var near = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) { entry.target.near = entry.isIntersecting; });
    work();
  }, { rootMargin: "400px" });
  var busy = false;
  function work() {
    if (busy) return;
    var next = Array.from(waiting).find(function (figure) { return figure.near && figure.isConnected; });
    if (!next) return;
    busy = true;
    waiting.delete(next);
    redraw(next).then(function () { busy = false; work(); });
  }
  function redraw(figure) {
    var spec = JSON.parse(figure.querySelector("script").textContent);
    var values = spec.data.values;
    spec.data.values = null;
    var shape = JSON.stringify(spec);
    var made = page.drawn.get(figure);
    if (made && figure.shape === shape) return made.view.data("rows", values).runAsync().catch(console.error);
    var zoomed = made && shown(made.view);
    figure.shape = shape;
    figure.style.minHeight = figure.offsetHeight + "px"; // so that the page does not jump
    return page.draw(figure).then(function (fresh) {
      figure.style.minHeight = "";
      return fresh && zoomed && shown(fresh.view) !== undefined ? fresh.view.signal("zoom_x", zoomed).runAsync() : null;
    }).catch(console.error);
  }
  function shown(view) { // the rounds that a reader has zoomed to: null for all, undefined where no zoom is possible
    try { return view.signal("zoom_x"); } catch (error) { return undefined; }
  }

  // --- sections

  function line(box) { return box.closest("label").querySelector("bdi").textContent; }
  function prepare(figure, place) {
    figure.place = place;
    figure.text = figure.querySelector("script").textContent;
    var hidden = off[place] = off[place] || new Set();
    figure.querySelectorAll("input").forEach(function (box) { box.checked = !hidden.has(line(box)); });
    figure.onchange = function (happened) { // the chart itself listens to each box
      if (happened.target.checked) hidden.delete(line(happened.target)); else hidden.add(line(happened.target));
    };
    near.observe(figure);
    waiting.add(figure);
  }
  function update_figure(old, fresh) {
    var text = fresh.querySelector("script").textContent;
    if (text === old.text) return;
    old.text = old.querySelector("script").textContent = text;
    old.querySelector(".live").setAttribute("aria-label", fresh.querySelector(".live").getAttribute("aria-label"));
    var boxes = old.querySelector(".toggles"), others = fresh.querySelector(".toggles");
    var hidden = off[old.place];
    var focused = boxes && boxes.contains(document.activeElement) ? line(document.activeElement) : null;
    var names = boxes && Array.from(boxes.querySelectorAll("input"), line).join("\n");
    if (names !== (others && Array.from(others.querySelectorAll("input"), line).join("\n"))) {
      if (boxes) boxes.remove();
      if (others) {
        old.insertBefore(others, old.querySelector("script"));
        others.querySelectorAll("input").forEach(function (box) {
          box.checked = !hidden.has(line(box));
          if (line(box) === focused) box.focus();
        });
      }
    }
    waiting.add(old);
  }
  function update_section(old, fresh, name) { // each chart, table or paragraph becomes the one of its kind and number
    var kinds = {};
    Array.from(old.children).forEach(function (child) { (kinds[child.tagName] = kinds[child.tagName] || []).push(child); });
    var charts = 0;
    var wanted = Array.from(fresh.children, function (child) {
      var key = child.tagName === "FIGURE" ? name + " " + charts++ : "";
      var kept = (kinds[child.tagName] || []).shift();
      if (!kept) {
        if (key) prepare(child, key);
        return child;
      }
      if (key) {
        update_figure(kept, child);
      } else if (!kept.isEqualNode(child)) {
        Array.from(child.attributes).forEach(function (each) { kept.setAttribute(each.name, each.value); });
        kept.replaceChildren.apply(kept, Array.from(child.childNodes)); // a scrolled table stays scrolled
      }
      return kept;
    });
    Object.keys(kinds).forEach(function (kind) { kinds[kind].forEach(function (child) { forget(child); child.remove(); }); });
    put_in_order(old, wanted);
  }
  function forget(element) {
    (element.tagName === "FIGURE" ? [element] : Array.from(element.querySelectorAll("figure"))).forEach(function (figure) {
      near.unobserve(figure);
      waiting.delete(figure);
      if (page.drawn.has(figure)) page.drawn.get(figure).finalize();
      page.drawn.delete(figure);
    });
  }
  function put_in_order(parent, children) { // a child that is in its place is not touched, because it may have the focus
    var next = parent.firstElementChild;
    children.forEach(function (child) {
      if (child === next) next = next.nextElementSibling; else parent.insertBefore(child, next);
    });
  }
  function arrange() {
    put_in_order(main, order.map(function (entry) { return document.getElementById(entry[0]); }).filter(Boolean));
  }

  // --- events

  function on_layout(layout) {
    document.querySelector("h1 bdi").textContent = layout.title;
    document.querySelector(".by").textContent = layout.by;
    var names = layout.order.map(function (entry) { return entry[0]; });
    Array.from(main.children).forEach(function (section) {
      if (names.indexOf(section.id) < 0) { forget(section); section.remove(); delete arrived[section.id]; }
    });
    if (JSON.stringify(order) !== JSON.stringify(layout.order)) {
      order = layout.order;
      document.querySelector("nav ul").replaceChildren.apply(document.querySelector("nav ul"), order.map(function (entry) {
        var item = document.createElement("li"), link = document.createElement("a");
        link.href = "#" + entry[0];
        link.textContent = entry[1];
        item.append(link);
        return item;
      }));
    }
    arrange();
  }
  function on_state(state) {
    bar.hidden = state.share === null;
    bar.value = state.share || 0;
    document.querySelector("#progress span").textContent = state.words;
    var percent = state.share === null ? "" : Math.floor(100 * state.share) + " % ";
    document.title = percent + document.querySelector("h1").textContent;
  }
  function on_section(section) {
    if (arrived[section.name] === section.html) return;
    arrived[section.name] = section.html;
    var template = document.createElement("template"); // names in it are escaped, and scripts in it do not run
    template.innerHTML = section.html;
    var fresh = template.content.firstElementChild, old = document.getElementById(section.name);
    if (old) {
      update_section(old, fresh, section.name);
    } else {
      main.append(fresh);
      fresh.querySelectorAll("figure").forEach(function (figure, place) { prepare(figure, section.name + " " + place); });
      arrange();
    }
    work();
  }
  function say(words) {
    if (says.textContent !== words) says.textContent = words;
    document.body.classList.toggle("lost", words !== "Connected.");
  }
  function connect() {
    window.clearTimeout(again);
    if (source) source.close();
    source = new EventSource("events");
    heard = Date.now();
    function take(kind, use) {
      source.addEventListener(kind, function (message) {
        heard = Date.now();
        say("Connected.");
        if (use) use(JSON.parse(message.data));
      });
    }
    take("layout", on_layout);
    take("state", on_state);
    take("section", on_section);
    take("beat", null);
    source.onerror = function () {
      source.close();
      say("Disconnected: fedstill watch does not answer. The page tries again by itself; the numbers below may be old.");
      again = window.setTimeout(connect, AGAIN);
    };
  }
  window.setInterval(function () {
    if (!document.hidden && Date.now() - heard > SILENCE) {
      say("Disconnected: no word from fedstill watch. The page tries again by itself; the numbers below may be old.");
      connect();
    }
  }, 5000);
  document.addEventListener("visibilitychange", function () { // nobody looks: no work
    if (!document.hidden) return connect();
    window.clearTimeout(again);
    if (source) source.close();
    return null;
  });
  connect();
})();
