// A search for an option, or a code: a dash before a word would exclude the word, and QK finds all of QKV.
addEventListener("input", (event) => {
  const box = event.target;
  if (box.matches?.(".md-search__input")) box.value = box.value.replace(/(^|\s)-+/g, "$1").replace(/\bQK-(?=[EW]\d)/i, "");
}, true);

// What scrolls can be reached by the keyboard.
function reach() {
  for (const region of document.querySelectorAll("article pre > code, .md-typeset__scrollwrap, .formula"))
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
}
addEventListener("resize", reach);

document$.subscribe(() => {
  // Short names, which site.css keeps on one line.
  for (const code of document.querySelectorAll("article :not(pre) > code"))
    if (code.textContent.length < 30) code.classList.add("short");
    else if (code.closest("td") && !code.classList.contains("words")) {
      const words = code.textContent.split(" ").map((word) => {
        const span = document.createElement("span");
        span.textContent = word;
        return [span, " "];
      });
      code.replaceChildren(...words.flat().slice(0, -1));
      code.classList.add("words");
    }
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // Navigation within navigation, and a button to copy, are no landmarks.
  for (const nav of document.querySelectorAll(".md-nav .md-nav, .md-code__nav")) {
    for (const name of ["aria-labelledby", "aria-label", "aria-expanded"]) nav.removeAttribute(name);
    nav.setAttribute("role", "none");
  }
  reach();
});
