"use strict";
// Without this script the page shows everything; with it, utterances can be sorted and filtered, and words played.
(() => {
  const list = document.getElementById("list");
  if (!list) return;
  const rows = [...list.children];
  const find = document.getElementById("find"), sort = document.getElementById("sort");
  const wrong = document.getElementById("wrong"), heard = document.getElementById("heard");
  const count = document.getElementById("count");
  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  let pair = null;

  function show() {
    const wanted = find.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = (!wanted || text.get(row).includes(wanted)) && (!wrong.checked || row.dataset.e !== "0") &&
        (!heard.checked || row.dataset.a === "1") && (!pair || row.dataset.p.includes(pair));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} utterances`;
  }
  function order() {
    const [key, way] = sort.value.split(" ");
    const number = (row) => Number(row.dataset[key]);
    rows.sort((a, b) => way * (number(a) - number(b)) || a.dataset.n - b.dataset.n);
    list.append(...rows);
  }
  let waiting = 0;
  find.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 150); });
  for (const box of [wrong, heard]) box.addEventListener("change", show);
  sort.addEventListener("change", order);
  document.getElementById("all").addEventListener("click", () => {
    find.value = ""; wrong.checked = heard.checked = false; pair = null; show();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-pair]");
    if (!button) return;
    find.value = ""; pair = ` ${button.dataset.pair} `; show();
    document.getElementById("utterances").scrollIntoView();
    find.focus({ preventScroll: true });
  });

  // A word plays from its time on; left and right go from word to word.
  const playerOf = (node) => node.closest(".u").querySelector("audio");
  function play(word) {
    const player = playerOf(word);
    if (!player) return;
    player.currentTime = Number(word.dataset.t);
    player.play();
  }
  list.addEventListener("click", (event) => {
    const word = event.target.closest("[data-t]");
    if (word) play(word);
  });
  list.addEventListener("keydown", (event) => {
    const group = event.target.closest(".al");
    const step = { ArrowLeft: -1, ArrowRight: 1, Enter: 0 }[event.key];
    if (!group || step === undefined) return;
    const words = [...group.querySelectorAll("[data-t]")];
    if (!words.length) return;
    event.preventDefault();
    const now = words.findIndex((word) => word.classList.contains("now"));
    const next = words[Math.min(words.length - 1, Math.max(0, now + (now < 0 ? 1 : step)))];
    mark(words, next);
    play(next);
  });
  function mark(words, one) {
    for (const word of words) word.classList.toggle("now", word === one);
  }
  list.addEventListener("timeupdate", (event) => {
    const time = event.target.currentTime;
    for (const group of event.target.closest(".u").querySelectorAll(".al")) {
      const words = [...group.querySelectorAll("[data-t]")];
      mark(words, words.filter((word) => Number(word.dataset.t) <= time + 0.02).pop());
    }
  }, true);
  // One utterance is heard at a time.
  list.addEventListener("play", (event) => {
    for (const player of list.querySelectorAll("audio")) if (player !== event.target) player.pause();
  }, true);
  show();
})();
