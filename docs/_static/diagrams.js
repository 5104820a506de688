// Draws the diagrams of a page in the mode that the reader has chosen, and again when the reader chooses another one.
(() => {
    const diagrams = [...document.querySelectorAll("pre.mermaid")];
    const texts = diagrams.map((diagram) => diagram.textContent);
    const system = matchMedia("(prefers-color-scheme: dark)");
    let drawn = null;
    let drawing = Promise.resolve();

    const isDark = () => {
        const chosen = document.body.dataset.theme;
        return chosen === "dark" || (chosen !== "light" && system.matches);
    };

    const draw = async () => {
        const dark = isDark();
        if (dark === drawn) return;
        drawn = dark;
        mermaid.initialize({
            startOnLoad: false,
            deterministicIds: true,
            darkMode: dark,
            theme: dark ? "dark" : "default",
        });
        diagrams.forEach((diagram, index) => {
            diagram.textContent = texts[index];
            diagram.removeAttribute("data-processed");
        });
        await mermaid.run({ nodes: diagrams });
    };

    // One drawing at a time: Mermaid does not run twice at once.
    const request = () => {
        drawing = drawing.then(draw).catch((error) => console.error("a diagram is not drawn:", error));
    };

    request();
    system.addEventListener("change", request);
    new MutationObserver(request).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
})();
